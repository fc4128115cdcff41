#pragma once

// Internal: stream capture and graphs. A captured graph is the list of its operations in the order in which the host
// recorded them; each belongs to a branch (one captured stream), and records and waits of events between branches are
// operations too, so that a replay checks the order between branches.

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

/// What a graph and the executables made of it share.
struct GraphBody {
    struct Node {
        enum class Kind : std::uint8_t { operation, fork, wait } kind;
        int branch;
        const char* name;
        const void* kernel;
        std::function<void()> body;
        int event;  // fork: marks the branch's progress under this number; wait: waits for it
    };
    std::vector<Node> nodes;
    std::vector<int> branch_devices;
    int events = 0;
    std::vector<GraphMemory> memory;
    std::vector<CUgraphNode_st> handles;  // that cudaGraphGetNodes gives away

    GraphBody() = default;
    GraphBody(const GraphBody&) = delete;
    GraphBody& operator=(const GraphBody&) = delete;
    ~GraphBody();  // gives the memory back
};

struct Capture {
    std::uint64_t number;  // of the process
    CUstream_st* origin;
    std::vector<CUstream_st*> streams;  // by branch
    std::set<int> unjoined;             // branches that have work the origin did not wait for
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
/// Whether this thread may not do what no capture allows (cudaMalloc, waiting for the device).
bool capture_forbids();
/// Makes the captures that are going on useless, as the runtime does after a forbidden call.
void invalidate_captures();

}  // namespace potluck::emulator

struct CUgraph_st {
    std::shared_ptr<potluck::emulator::GraphBody> body;
};
struct CUgraphExec_st {
    std::shared_ptr<potluck::emulator::GraphBody> body;
};
