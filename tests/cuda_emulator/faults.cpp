// Faults: the list of recorded faults, and their effect on the device.

#include <fmt/format.h>

#include <cstdio>
#include <utility>

#include "tests/cuda_emulator/arena.h"
#include "tests/cuda_emulator/state.h"

namespace potluck::emulator {
namespace {

std::mutex list_mutex;
std::vector<Fault>& list() {
    static auto* faults = new std::vector<Fault>;
    return *faults;
}

const char* name_of(FaultKind kind) {
    switch (kind) {
        case FaultKind::out_of_bounds:
            return "out of bounds";
        case FaultKind::use_after_free:
            return "use after free";
        case FaultKind::never_written:
            return "never written";
        case FaultKind::misaligned:
            return "misaligned";
        case FaultKind::wrong_device:
            return "wrong device";
        case FaultKind::host_pointer:
            return "host pointer";
        case FaultKind::missing_order:
            return "missing order";
        case FaultKind::barrier:
            return "barrier";
        case FaultKind::warp:
            return "warp";
        case FaultKind::shared_race:
            return "race in shared memory";
        case FaultKind::kernel_race:
            return "race in device memory";
        case FaultKind::launch:
            return "launch";
        case FaultKind::bad_argument:
            return "bad argument";
        case FaultKind::exception:
            return "exception";
        case FaultKind::leak:
            return "leak";
    }
    return "?";
}

}  // namespace

void record_fault(FaultKind kind, std::string text) {
    const std::lock_guard lock(list_mutex);
    list().push_back({kind, std::move(text)});
}
void report(FaultKind kind, std::string text) { record_fault(kind, std::move(text)); }

std::vector<Fault> faults() {
    const std::lock_guard lock(list_mutex);
    return list();
}

std::vector<Fault> take_faults() {
    State& all = state();
    const std::lock_guard lock(all.mutex);
    for (const auto& device : all.devices) device->sticky = cudaSuccess;
    cudaGetLastError();
    const std::lock_guard list_lock(list_mutex);
    return std::exchange(list(), {});
}

std::string last_fault_text() {
    const std::lock_guard lock(list_mutex);
    return list().empty() ? std::string() : list().back().text;
}

cudaError_t status_of(FaultKind kind) {
    switch (kind) {
        case FaultKind::out_of_bounds:
        case FaultKind::use_after_free:
        case FaultKind::wrong_device:
        case FaultKind::host_pointer:
            return cudaErrorIllegalAddress;
        case FaultKind::misaligned:
            return cudaErrorMisalignedAddress;
        case FaultKind::launch:
            return cudaErrorInvalidConfiguration;
        case FaultKind::bad_argument:
            return cudaErrorInvalidValue;
        default:
            return cudaErrorLaunchFailure;
    }
}

void stop(FaultKind kind, std::string text) {
    const cudaError_t status = status_of(kind);
    if (is_kernel_thread()) {
        text += fmt::format(" ({})", describe_thread());
        record_fault(kind, std::move(text));
        abandon_kernel(status);
    }
    record_fault(kind, std::move(text));
    if (kind != FaultKind::bad_argument)
        state().devices[static_cast<std::size_t>(running.device)]->sticky = status;
    throw StoppedOperation{status};
}

int report_at_end() {
    const std::vector<Fault> seen = faults();
    for (const Fault& fault : seen)
        std::fprintf(stderr, "CUDA emulator: %s: %s\n", name_of(fault.kind), fault.text.c_str());
    const std::vector<std::string> alive = live_allocations();
    for (const std::string& line : alive)
        std::fprintf(stderr, "CUDA emulator: never freed: %s\n", line.c_str());
    return static_cast<int>(seen.size() + alive.size());
}

}  // namespace potluck::emulator
