#pragma once

// Internal: all objects that exist in the emulated runtime, and the shared functions of its parts.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tests/cuda_emulator/device_memory.h"
#include "tests/cuda_emulator/emulator.h"
#include "tests/cuda_emulator/pinned_memory.h"
#include "tests/cuda_emulator/streams.h"

namespace potluck::emulator {

struct EmulatedDevice {
    EmulatedDevice(int index, std::uint64_t bytes);

    int index;
    DeviceMemory memory;
    CUmemPoolHandle_st default_pool;
    CUstream_st legacy_stream;
    cudaError_t sticky = cudaSuccess;  // after a fault, until the test takes it
    // While a single stream has ever accessed the device's memory, order needs no checks.
    int first_slot = -1;
    std::uint64_t first_stream = 0;
    bool has_several_streams = false;
};

/// The properties in which GPUs differ.
struct Card {
    int capability;                 // compute capability, 80 for 8.0
    std::size_t most_shared_bytes;  // for a block that asks for more than 48 KiB
};

struct State {
    State();

    std::recursive_mutex mutex;
    std::vector<std::unique_ptr<EmulatedDevice>> devices;
    std::set<CUstream_st*> streams;
    std::set<CUevent_st*> events;
    std::set<CUmemPoolHandle_st*> pools;
    std::set<cudaGraph_t> graphs;
    std::set<cudaGraphExec_t> executables;
    PinnedMemory pinned;
    Clock host_clock;              // the operations for which the host has waited
    std::uint64_t host_waits = 0;  // number of calls in which the host waited
    bool has_memory_pools = true;
    bool has_peers = true;      // see set_peer_access()
    bool answers_late = false;  // see set_late_answers()
    Card card;
    std::map<const void*, int> shared_limits;  // kernel -> bytes, see cudaFuncSetAttribute
};

/// Never destroyed: static destructors of a program may still free tensors.
State& state();

/// An integer from the environment. Throws Error when it is invalid or not between `least` and `most`.
std::int64_t setting(const char* name, std::int64_t least, std::int64_t most, std::int64_t otherwise);

/// Thrown by a fault outside kernels.
struct StoppedOperation {
    cudaError_t status;
};
/// Records the fault, makes the running operation's device unusable until take_faults(), and ends the kernel or the
/// library call.
[[noreturn]] void stop(FaultKind kind, std::string text);
/// Adds a fault to the list.
void record_fault(FaultKind kind, std::string text);
cudaError_t status_of(FaultKind kind);

/// Describes where an address of device memory is.
std::string describe(std::uintptr_t address);
/// Reports a fault unless the running operation may read or write these bytes of device memory.
void check_stretch(std::uintptr_t address, std::uint64_t bytes, bool write, const char* what);

bool is_stack_guard(std::uintptr_t address);

/// Whether the calling code is a thread of a kernel; such a thread is abandoned.
bool is_kernel_thread();
[[noreturn]] void abandon_kernel(cudaError_t status);
/// "block (0, 0, 0), thread (5, 0, 0)"
std::string describe_thread();

/// The stream of a handle on the current device; nullptr for an invalid handle.
CUstream_st* find_stream(cudaStream_t handle);
int current_device();
/// The number of a new stream.
std::uint64_t take_stream_number();

}  // namespace potluck::emulator
