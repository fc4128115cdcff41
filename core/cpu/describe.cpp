#include <omp.h>

#include <fstream>
#include <string>
#include <string_view>
#include <thread>

#include "core/cpu/cpu_backend.h"
#include "core/format.h"

namespace potluck {
namespace {

/// The value of the first entry `key` in a file such as /proc/cpuinfo; empty when there is none.
std::string entry_of(const char* path, std::string_view key) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        if (!line.starts_with(key)) continue;
        const std::size_t value = line.find_first_not_of(" \t:", key.size());
        return value == std::string::npos ? "" : line.substr(value);
    }
    return "";
}

}  // namespace

int CpuBackend::threads() const {
    static const int standard = omp_get_max_threads();
    const int chosen = threads_.load(std::memory_order_relaxed);
    return chosen == 0 ? standard : chosen;
}

std::string CpuBackend::describe() const {
    std::string text = entry_of("/proc/cpuinfo", "model name");
    if (text.empty()) text = "CPU";
    text += fmt::format(", {} of {} cores", threads(), std::thread::hardware_concurrency());
    if (const std::string memory = entry_of("/proc/meminfo", "MemTotal"); !memory.empty())
        text += fmt::format(", {:.1f} GiB", std::stod(memory) / 0x1p20);
    return text;
}

}  // namespace potluck
