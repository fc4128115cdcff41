#pragma once

// The CUDA emulator, for tests: the faults that it has recorded, the devices it offers, and what was never freed. The
// CUDA runtime itself is used through its own header, <cuda_runtime_api.h>.
//
// Settings from the environment:
//   POTLUCK_EMULATED_DEVICES  number of devices (default 1)
//   POTLUCK_EMULATED_MEMORY   bytes of memory per device (default 8 GiB)
//   POTLUCK_EMULATED_CARD     compute capability: 80 (default), 86, 89 or 90; they differ in their shared memory
//   POTLUCK_EMULATOR_THREADS  host threads that execute thread blocks (default: one per core); no result depends on it

#include <cstdint>
#include <string>
#include <vector>

namespace potluck::emulator {

enum class FaultKind : std::uint8_t {
    out_of_bounds,   // an address of the device that belongs to no allocation
    use_after_free,  // an address in an allocation that was freed
    never_written,   // a read of memory that was never written
    misaligned,      // an access whose address is not a multiple of its size
    wrong_device,    // a kernel of one device accesses the memory of another, or a copy lacks peer access
    host_pointer,    // a host address where a device address is required, or the reverse
    missing_order,   // two streams access the same memory, and no event orders them
    barrier,         // __syncthreads not reached by all threads
    warp,            // a warp function with missing lanes or with a wrong mask
    shared_race,     // two threads access the same shared memory, one writes, no barrier between
    kernel_race,     // two threads of a kernel access the same device memory, one writes, nothing orders them
    launch,          // a kernel that no GPU could launch
    bad_argument,    // a library call that the real library would refuse
    exception,       // a kernel threw
    leak,
};

struct Fault {
    FaultKind kind;
    std::string text;
};

/// The faults since the last take_faults(), oldest first.
std::vector<Fault> faults();
/// Returns and clears the faults, and makes every device usable again. (On a GPU a fault ends the context, and only a
/// new process can use the device again; tests plant many faults in one process.)
std::vector<Fault> take_faults();
/// The text of the newest fault, "" when there is none.
std::string last_fault_text();
/// Records a fault without stopping anything.
void report(FaultKind kind, std::string text);

/// Changes the number of devices and the memory of each. Throws std::logic_error when an object still exists on a
/// device that would be removed, or when more memory is in use than would remain.
void configure(int devices, std::int64_t bytes_of_each);
int devices();
/// Whether devices can access each other's memory (initially true): then a pool can be opened to another device.
void set_peer_access(bool possible);
/// Whether an event that the host did not wait for is "not ready" at its first query, as may happen on a GPU.
/// (Otherwise all started work is always complete.)
void set_late_answers(bool late);

/// How often the host has waited for a device so far: synchronisations of streams, events and devices, and blocking
/// copies. A query whether something is complete does not count.
std::uint64_t host_waits();

/// Gives all devices a compute capability: 80, 86, 89 or 90. A block has at most 163, 99, 99 or 227 KiB of shared
/// memory there. Throws Error for any other.
void set_card(int capability);
/// Whether the devices have memory pools (cudaDevAttrMemoryPoolsSupported); initially true.
void set_memory_pools(bool supported);

/// One line for each existing object: device memory, pinned host memory, streams, events, memory pools and graphs.
std::vector<std::string> live_allocations();

/// For the end of a test program: prints the faults that no test has taken and everything that was never freed, and
/// returns how many there are.
int report_at_end();

}  // namespace potluck::emulator
