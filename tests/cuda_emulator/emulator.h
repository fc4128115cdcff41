#pragma once

// The CUDA emulator, for tests: faults that it saw, the devices it offers, and what was never freed. The CUDA runtime
// itself is used through its own header, <cuda_runtime_api.h>.
//
// Settings from the environment:
//   POTLUCK_EMULATED_DEVICES  number of devices (default 1)
//   POTLUCK_EMULATED_MEMORY   bytes of memory of each (default 8 GiB)
//   POTLUCK_EMULATED_CARD     compute capability: 80 (default), 86, 89 or 90; they differ in their shared memory
//   POTLUCK_EMULATOR_THREADS  host threads that run thread blocks (default: one per core); no result depends on it

#include <cstdint>
#include <string>
#include <vector>

namespace potluck::emulator {

enum class FaultKind : std::uint8_t {
    out_of_bounds,   // an address of the device that belongs to no allocation
    use_after_free,  // an address in an allocation that was freed
    never_written,   // a read of memory that nobody has written
    misaligned,      // an access whose address is no multiple of its size
    wrong_device,    // a kernel of one device touches the memory of another, or a copy without access
    host_pointer,    // a host address where one of the device is needed, or the other way round
    missing_order,   // two streams touch the same memory, and no event orders them
    barrier,         // __syncthreads not reached by all threads
    warp,            // a warp function with absent lanes or with a wrong mask
    shared_race,     // two threads touch the same shared memory, one writes, no barrier between
    kernel_race,     // two threads of a kernel touch the same device memory, one writes, nothing orders them
    launch,          // a kernel that no card could start
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
/// Returns and forgets the faults, and leaves every device usable again. (On a card a fault ends the context, and only
/// a new process has a usable device; tests plant many faults in one process.)
std::vector<Fault> take_faults();
/// The text of the newest fault, "" when there is none.
std::string last_fault_text();
/// Records a fault that stops nothing.
void report(FaultKind kind, std::string text);

/// Changes the number of devices and the memory of each. Throws std::logic_error when something is alive on a device that
/// would go, or more is in use than would be left.
void configure(int devices, std::int64_t bytes_of_each);
int devices();
/// Whether devices reach each other's memory (they do at first): then a pool can be opened to the copies of another device.
void set_peer_access(bool possible);
/// Whether an event that the host did not wait for says "not ready" when it is first asked, as it may on a card. (Otherwise
/// whatever was started is always done.)
void set_late_answers(bool late);

/// How often the host has waited for a device so far: synchronisations of streams, events and devices, and blocking
/// copies. To ask whether something is done is no wait.
std::uint64_t host_waits();

/// Makes all devices cards of a compute capability: 80, 86, 89 or 90. A block has at most 163, 99, 99 or 227 KiB of shared
/// memory there. Throws Error for any other.
void set_card(int capability);
/// Whether the devices have memory pools (cudaDevAttrMemoryPoolsSupported), as they do at first.
void set_memory_pools(bool supported);

/// One line for each piece of device memory, pinned host memory, stream, event, memory pool and graph that is alive.
std::vector<std::string> live_allocations();

/// For the end of a test program: prints the faults that nobody took and everything that was never freed, and returns
/// how many there are.
int report_at_end();

}  // namespace potluck::emulator
