#pragma once

// Internal: stream capture and graphs. A captured graph is the list of its operations in the order in which the host
// recorded them. Each belongs to a branch (one captured stream); event records and waits between branches are also
// operations, so that a replay checks the order between branches.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "tests/cuda_emulator/streams.h"

/// An operation of a graph, as users see it.
struct CUgraphNode_st {};

namespace potluck::emulator {

/// Memory that a graph allocates: it has the same address in every replay.
struct GraphMemory {
    int device;
    std::uintptr_t address;
};

/// The data that a graph and its executables share.
struct GraphBody {
    struct Node {
        enum class Kind : std::uint8_t { operation, fork, wait } kind;
        int branch;
        const char* name;
        const void* kernel;
        std::function<void()> body;
        int event;  // fork: marks the branch's progress with this number; wait: waits for it
    };
    std::vector<Node> nodes;
    std::vector<int> branch_devices;
    int events = 0;
    std::vector<GraphMemory> memory;
    std::vector<CUgraphNode_st> handles;  // returned by cudaGraphGetNodes

    GraphBody() = default;
    GraphBody(const GraphBody&) = delete;
    GraphBody& operator=(const GraphBody&) = delete;
    ~GraphBody();  // frees the memory
};

struct Capture {
    std::uint64_t number;  // unique in the process
    CUstream_st* origin;
    std::vector<CUstream_st*> streams;  // by branch
    std::set<int> unjoined;             // branches with work for which the origin has not waited
    std::shared_ptr<GraphBody> body;
    bool is_valid = true;
    cudaStreamCaptureMode mode;
    std::thread::id thread;
};

void record_operation(CUstream_st& stream, const char* name, const void* kernel, std::function<void()> body);
/// cudaEventRecord and cudaStreamWaitEvent while streams are captured.
void record_event(CUevent_st& event, CUstream_st& stream);
cudaError_t wait_captured(CUstream_st& stream, CUevent_st& event);
/// Runs the operations in `stream`.
cudaError_t replay(GraphBody& body, CUstream_st& stream);
/// Addresses of memory that graphs allocated.
std::set<std::uintptr_t>& graph_memory();
bool is_graph_memory(std::uintptr_t address);
/// Whether this thread must not make calls that are forbidden during capture (cudaMalloc, waiting for the device).
bool capture_forbids();
/// Invalidates the active captures, as the runtime does after a forbidden call.
void invalidate_captures();

}  // namespace potluck::emulator

struct CUgraph_st {
    std::shared_ptr<potluck::emulator::GraphBody> body;
};
struct CUgraphExec_st {
    std::shared_ptr<potluck::emulator::GraphBody> body;
};
