#include "tests/cuda_emulator/static_shared.h"

#include <elf.h>
#include <link.h>

#include <mutex>
#include <set>
#include <unordered_map>

#include "tests/cuda_emulator/kernel_body.h"

namespace potluck::emulator {
namespace {

struct Search {
    std::uintptr_t kernel;
    StaticShared found;
};

int look_into(dl_phdr_info* module, std::size_t, void* data) {
    auto& search = *static_cast<Search*>(data);
    bool holds_kernel = false;
    std::size_t bytes = 0;
    for (int i = 0; i < module->dlpi_phnum; ++i) {
        const auto& segment = module->dlpi_phdr[i];
        if (segment.p_type == PT_LOAD &&
            search.kernel - (module->dlpi_addr + segment.p_vaddr) < segment.p_memsz)
            holds_kernel = true;
        if (segment.p_type == PT_TLS) bytes = segment.p_memsz;
    }
    if (!holds_kernel) return 0;
    if (module->dlpi_tls_data != nullptr)
        search.found = {reinterpret_cast<std::uintptr_t>(module->dlpi_tls_data), bytes / 4 * 4};
    return 1;
}

struct Place {
    std::uintptr_t address;
    bool is_inside;
};

int look_for_place(dl_phdr_info* module, std::size_t, void* data) {
    auto& place = *static_cast<Place*>(data);
    for (int i = 0; i < module->dlpi_phnum; ++i) {
        const auto& segment = module->dlpi_phdr[i];
        if (segment.p_type == PT_LOAD &&
            place.address - (module->dlpi_addr + segment.p_vaddr) < segment.p_memsz)
            place.is_inside = true;
    }
    return place.is_inside ? 1 : 0;
}

struct Tables {
    std::mutex mutex;
    std::set<const StaticSharedBytes*> known;  // by their start
    std::unordered_map<const void*, std::size_t> bytes;
};
/// Filled before main() begins and never destroyed.
Tables& tables() {
    static auto* all = new Tables;
    return *all;
}

}  // namespace

bool add_static_shared(const StaticSharedBytes* begin, const StaticSharedBytes* end) {
    const std::lock_guard lock(tables().mutex);
    if (begin == nullptr || !tables().known.insert(begin).second) return true;
    for (const StaticSharedBytes* line = begin; line != end; ++line)
        tables().bytes[line->kernel] = line->bytes;
    return true;
}

std::size_t static_shared_bytes(const void* kernel) {
    const std::lock_guard lock(tables().mutex);
    const auto found = tables().bytes.find(kernel);
    return found == tables().bytes.end() ? 0 : found->second;
}

bool is_in_a_program(std::uintptr_t address) {
    Place place{address, false};
    dl_iterate_phdr(look_for_place, &place);
    return place.is_inside;
}

StaticShared static_shared_of(const void* kernel) {
    // Without a destructor: a tensor in a static variable may launch a kernel after this thread's other variables are
    // destroyed.
    struct Known {
        const void* kernel;
        StaticShared shared;
    };
    constexpr std::size_t places = 256;
    static thread_local Known known[places];
    Known& place = known[reinterpret_cast<std::uintptr_t>(kernel) / 16 % places];
    if (place.kernel == kernel) return place.shared;
    Search search{reinterpret_cast<std::uintptr_t>(kernel), {}};
    dl_iterate_phdr(look_into, &search);
    // A thread that has not accessed the library's variables yet has none; it may have them later.
    if (search.found.bytes != 0) place = {kernel, search.found};
    return search.found;
}

}  // namespace potluck::emulator
