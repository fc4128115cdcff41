// The CUDA runtime: stream capture and graphs.

#include <algorithm>
#include <memory>

#include "tests/cuda_emulator/arena.h"
#include "tests/cuda_emulator/graph.h"
#include "tests/cuda_emulator/runtime.h"

namespace potluck::emulator {
namespace {

std::uint64_t next_capture = 1;
std::set<Capture*>& captures() {
    static auto* all = new std::set<Capture*>;
    return *all;
}

}  // namespace

GraphBody::~GraphBody() {
    const std::lock_guard lock(state().mutex);
    for (const GraphMemory& own : memory) {
        graph_memory().erase(own.address);
        if (is_device(own.device)) device(own.device).memory.release(own.address, "the end of its graph");
    }
}

std::set<std::uintptr_t>& graph_memory() {
    static auto* all = new std::set<std::uintptr_t>;
    return *all;
}
bool is_graph_memory(std::uintptr_t address) { return graph_memory().count(address) != 0; }

void record_operation(CUstream_st& stream, const char* name, const void* kernel, std::function<void()> body) {
    Capture& capture = *stream.capture;
    for (const GraphMemory& own : capture.body->memory) graph_memory().insert(own.address);
    if (stream.branch != 0) capture.unjoined.insert(stream.branch);
    capture.body->nodes.push_back({.kind = GraphBody::Node::Kind::operation,
                                   .branch = stream.branch,
                                   .name = name,
                                   .kernel = kernel,
                                   .body = std::move(body),
                                   .event = -1});
}

void record_event(CUevent_st& event, CUstream_st& stream) {
    Capture& capture = *stream.capture;
    const int number = capture.body->events++;
    event.capture = &capture;
    event.capture_number = capture.number;
    event.recorded = true;
    event.branch = stream.branch;
    event.graph_event = number;
    capture.body->nodes.push_back({.kind = GraphBody::Node::Kind::fork,
                                   .branch = stream.branch,
                                   .name = "cudaEventRecord",
                                   .kernel = nullptr,
                                   .body = {},
                                   .event = number});
}

cudaError_t wait_captured(CUstream_st& stream, CUevent_st& event) {
    Capture* capture = event.capture;
    if (captures().count(capture) == 0 || capture->number != event.capture_number)
        return cudaErrorCapturedEvent;  // that capture has ended
    if (stream.is_legacy) return cudaErrorStreamCaptureImplicit;
    if (stream.capture == nullptr) {
        stream.capture = capture;
        stream.branch = static_cast<int>(capture->streams.size());
        capture->streams.push_back(&stream);
        capture->body->branch_devices.push_back(stream.device);
    } else if (stream.capture != capture) {
        return cudaErrorStreamCaptureMerge;
    }
    capture->body->nodes.push_back({.kind = GraphBody::Node::Kind::wait,
                                    .branch = stream.branch,
                                    .name = "cudaStreamWaitEvent",
                                    .kernel = nullptr,
                                    .body = {},
                                    .event = event.graph_event});
    // The work of the other branch before the event is joined; the capture may end only when no branch is left.
    capture->unjoined.erase(event.branch);
    if (stream.branch != 0) capture->unjoined.insert(stream.branch);
    return cudaSuccess;
}

cudaError_t replay(GraphBody& body, CUstream_st& stream) {
    // Branches other than the first run in their own streams, which are empty at first.
    std::vector<std::unique_ptr<CUstream_st>> branches;
    for (std::size_t branch = 1; branch < body.branch_devices.size(); ++branch) {
        auto made = std::make_unique<CUstream_st>();
        made->device = body.branch_devices[branch];
        made->slot = new_slot();
        made->waits_for_legacy = false;
        made->number = take_stream_number();
        made->clock = stream.clock;
        branches.push_back(std::move(made));
    }
    const auto stream_of = [&](int branch) {
        return branch == 0 ? &stream : branches[static_cast<std::size_t>(branch) - 1].get();
    };
    std::vector<Clock> events(static_cast<std::size_t>(body.events));
    cudaError_t status = cudaSuccess;
    for (const GraphBody::Node& node : body.nodes) {
        CUstream_st* own = stream_of(node.branch);
        switch (node.kind) {
            case GraphBody::Node::Kind::operation: {
                CUstream_st* const only[] = {own};
                status = run_operation(only, node.name, node.kernel, node.body);
                break;
            }
            case GraphBody::Node::Kind::fork:
                events[static_cast<std::size_t>(node.event)] = own->clock;
                break;
            case GraphBody::Node::Kind::wait:
                join(own->clock, events[static_cast<std::size_t>(node.event)]);
                break;
        }
        if (status != cudaSuccess) break;
    }
    for (const auto& branch : branches) {
        join(stream.clock, branch->clock);
        free_slot(branch->slot);
    }
    return status;
}

bool capture_forbids() {
    return std::any_of(captures().begin(), captures().end(), [](const Capture* capture) {
        return capture->mode == cudaStreamCaptureModeGlobal ||
               (capture->mode == cudaStreamCaptureModeThreadLocal &&
                capture->thread == std::this_thread::get_id());
    });
}

void invalidate_captures() {
    for (Capture* capture : captures()) capture->is_valid = false;
}

}  // namespace potluck::emulator

using namespace potluck::emulator;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    const std::lock_guard lock(state().mutex);
    CUstream_st* stream = find_stream(handle);
    if (stream == nullptr) return finish(cudaErrorInvalidResourceHandle);
    if (static_cast<unsigned>(mode) > cudaStreamCaptureModeRelaxed) return finish(cudaErrorInvalidValue);
    if (stream->is_legacy) return finish(cudaErrorStreamCaptureUnsupported);
    if (stream->capture != nullptr) return finish(cudaErrorIllegalState);
    if (const cudaError_t status = device(stream->device).sticky; status != cudaSuccess)
        return finish(status);
    auto* capture = new Capture{.number = next_capture++,
                                .origin = stream,
                                .streams = {stream},
                                .unjoined = {},
                                .body = std::make_shared<GraphBody>(),
                                .mode = mode,
                                .thread = std::this_thread::get_id()};
    capture->body->branch_devices.push_back(stream->device);
    captures().insert(capture);
    stream->capture = capture;
    stream->branch = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
    const std::lock_guard lock(state().mutex);
    CUstream_st* stream = find_stream(handle);
    if (stream == nullptr) return finish(cudaErrorInvalidResourceHandle);
    if (graph == nullptr) return finish(cudaErrorInvalidValue);
    *graph = nullptr;
    if (stream->capture == nullptr) return finish(cudaErrorIllegalState);
    const std::unique_ptr<Capture> capture(stream->capture);
    if (capture->origin != stream) {
        (void)const_cast<std::unique_ptr<Capture>&>(capture).release();
        return finish(cudaErrorStreamCaptureUnmatched);
    }
    for (CUstream_st* member : capture->streams)
        if (state().streams.count(member) != 0) member->capture = nullptr;
    captures().erase(capture.get());
    if (!capture->is_valid) return finish(cudaErrorStreamCaptureInvalidated);
    if (!capture->unjoined.empty()) return finish(cudaErrorStreamCaptureUnjoined);
    *graph = new CUgraph_st{capture->body};
    state().graphs.insert(*graph);
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
    const std::lock_guard lock(state().mutex);
    constexpr unsigned long long known =
        cudaGraphInstantiateFlagAutoFreeOnLaunch | cudaGraphInstantiateFlagUseNodePriority;
    if (executable == nullptr || state().graphs.count(graph) == 0 || (flags & ~known) != 0)
        return finish(cudaErrorInvalidValue);
    *executable = new CUgraphExec_st{graph->body};
    state().executables.insert(*executable);
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
    const std::lock_guard lock(state().mutex);
    CUstream_st* stream = find_stream(handle);
    if (state().executables.count(executable) == 0) return finish(cudaErrorInvalidValue);
    if (stream == nullptr) return finish(cudaErrorInvalidResourceHandle);
    if (stream->capture != nullptr) return finish(cudaErrorStreamCaptureUnsupported);
    return finish(replay(*executable->body, *stream));
}

cudaError_t cudaGraphUpload(cudaGraphExec_t executable, cudaStream_t) {
    const std::lock_guard lock(state().mutex);
    return state().executables.count(executable) == 0 ? finish(cudaErrorInvalidValue) : cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    const std::lock_guard lock(state().mutex);
    if (state().executables.erase(executable) == 0) return finish(cudaErrorInvalidValue);
    delete executable;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    const std::lock_guard lock(state().mutex);
    if (state().graphs.erase(graph) == 0) return finish(cudaErrorInvalidValue);
    delete graph;
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
    const std::lock_guard lock(state().mutex);
    if (state().graphs.count(graph) == 0 || count == nullptr) return finish(cudaErrorInvalidValue);
    const auto& recorded = graph->body->nodes;
    const auto operations = static_cast<std::size_t>(std::count_if(
        recorded.begin(), recorded.end(),
        [](const GraphBody::Node& node) { return node.kind == GraphBody::Node::Kind::operation; }));
    if (nodes == nullptr) {
        *count = operations;
        return cudaSuccess;
    }
    auto& handles = graph->body->handles;
    handles.resize(operations);
    for (std::size_t i = 0; i < *count; ++i) nodes[i] = i < operations ? &handles[i] : nullptr;
    *count = std::min(*count, operations);
    return cudaSuccess;
}
}
