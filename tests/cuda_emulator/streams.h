#pragma once

// Internal: streams, events and the order between operations.
//
// Every operation has a serial number. A clock holds, for each stream, the newest operation that is known to have
// ended; an operation happens before another if the other's clock covers it. Events, waits and synchronisation join
// clocks. Operations are executed immediately, in the order in which the host starts them, so that results never depend
// on timing; the clocks show in which other orders a GPU could have executed them.

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace potluck::emulator {

/// Indexed by stream slot.
using Clock = std::vector<std::uint32_t>;
void join(Clock& clock, const Clock& other);

struct Capture;

}  // namespace potluck::emulator

struct CUstream_st {
    int device = 0;
    std::uint16_t slot = 0;
    bool waits_for_legacy = true;  // not created with cudaStreamNonBlocking
    bool is_legacy = false;
    std::uint64_t number = 0;  // unique in the process
    potluck::emulator::Clock clock;
    potluck::emulator::Capture* capture = nullptr;
    int branch = 0;  // of the capture
};

struct CUevent_st {
    int device = 0;
    bool has_timing = false;
    bool recorded = false;
    bool was_queried = false;  // since it was recorded
    potluck::emulator::Clock clock;
    std::chrono::steady_clock::time_point time;
    potluck::emulator::Capture* capture = nullptr;  // recorded in this capture, not in a running stream
    std::uint64_t capture_number = 0;
    int branch = 0;
    int graph_event = -1;
};

namespace potluck::emulator {

/// The current operation, for reports and for the check of its order.
struct RunningOperation {
    const char* name = "";
    const void* kernel = nullptr;
    int device = 0;
    std::uint32_t serial = 0;
    std::uint16_t slot = 0;
    const std::uint32_t* clock = nullptr;
    bool is_ordered = false;  // whether accesses must be checked against those of other streams
};
extern RunningOperation running;

/// Runs `body` as one operation that begins after all of `streams`, and for which all wait. Returns the error of the
/// body.
cudaError_t run_operation(std::span<CUstream_st* const> streams, const char* name, const void* kernel,
                          const std::function<void()>& body);
/// The same for one stream; records the operation while the stream is captured.
cudaError_t start_operation(CUstream_st& stream, const char* name, const void* kernel,
                            std::function<void()> body);

/// "kernel softmax_forward of op softmax, stream 2 of cuda:0"
std::string describe_operation(std::uint32_t serial);
std::string describe_running();

/// Reports a fault when an operation that is not ordered before the running one has accessed one of these 4-byte
/// granules.
void check_order(std::uint64_t first_granule, std::uint64_t granules, bool write);

/// Declares that from now on `stream` also uses memory of `device`.
void note_use(int device, const CUstream_st& stream);

std::uint16_t new_slot();
void free_slot(std::uint16_t slot);

}  // namespace potluck::emulator
