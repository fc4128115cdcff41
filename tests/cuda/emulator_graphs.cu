// The emulator's stream capture and graphs.

#include <cstdint>
#include <utility>

#include "cuda/launch.h"
#include "tests/cuda/emulator_support.h"

using namespace potluck;
using potluck::test::Buffer;
using potluck::test::expect_fault;
using potluck::test::FaultKind;

namespace {

__global__ void add(float* to, float value) { to[threadIdx.x] += value; }
__global__ void copy(const float* from, float* to) { to[threadIdx.x] = from[threadIdx.x]; }

/// A captured graph, ready to launch.
class Graph {
public:
    explicit Graph(cudaStream_t stream) {
        cuda::check(cudaStreamEndCapture(stream, &graph_), "cudaStreamEndCapture");
        cuda::check(cudaGraphInstantiate(&executable_, graph_, 0), "cudaGraphInstantiate");
    }
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;
    ~Graph() {
        cudaGraphExecDestroy(executable_);
        cudaGraphDestroy(graph_);
    }
    cudaError_t launch(cudaStream_t stream) const { return cudaGraphLaunch(executable_, stream); }
    std::size_t nodes() const {
        std::size_t count = 0;
        cuda::check(cudaGraphGetNodes(graph_, nullptr, &count), "cudaGraphGetNodes");
        return count;
    }

private:
    cudaGraph_t graph_ = nullptr;
    cudaGraphExec_t executable_ = nullptr;
};

void begin(cudaStream_t stream) {
    cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
}

}  // namespace

TEST_CASE("cuda emulator: a captured stream runs nothing until its graph is launched, then the same again") {
    const cuda::Stream stream;
    const Buffer<float> x(std::vector<float>(8, 1.0f), stream.get());
    begin(stream.get());
    cudaStreamCaptureStatus status{};
    REQUIRE(cudaStreamIsCapturing(stream.get(), &status) == cudaSuccess);
    CHECK(status == cudaStreamCaptureStatusActive);
    cuda::launch(add, 1, 8, 0, stream.get(), x.data(), 2.0f);
    REQUIRE(cudaMemsetAsync(x.data() + 4, 0, 16, stream.get()) == cudaSuccess);
    const Graph graph(stream.get());
    CHECK(graph.nodes() == 2);
    CHECK(x.to_host() == std::vector<float>(8, 1.0f));
    REQUIRE(graph.launch(stream.get()) == cudaSuccess);
    CHECK(x.to_host() == std::vector<float>{3, 3, 3, 3, 0, 0, 0, 0});
    REQUIRE(graph.launch(stream.get()) == cudaSuccess);
    CHECK(x.to_host() == std::vector<float>{5, 5, 5, 5, 0, 0, 0, 0});
}

TEST_CASE("cuda emulator: memory allocated and freed in a capture belongs to the graph") {
    const cuda::Stream stream;
    const Buffer<float> x(std::vector<float>(8, 1.0f), stream.get());
    const Buffer<float> y(8, stream.get());
    const std::size_t before = emulator::live_allocations().size();
    {
        begin(stream.get());
        void* memory = nullptr;
        REQUIRE(cudaMallocAsync(&memory, 32, stream.get()) == cudaSuccess);
        auto* scratch = static_cast<float*>(memory);
        cuda::launch(copy, 1, 8, 0, stream.get(), x.data(), scratch);
        cuda::launch(add, 1, 8, 0, stream.get(), scratch, 1.0f);
        cuda::launch(copy, 1, 8, 0, stream.get(), scratch, y.data());
        REQUIRE(cudaFreeAsync(memory, stream.get()) == cudaSuccess);
        const Graph graph(stream.get());
        for (int i = 0; i < 2; ++i) {
            REQUIRE(graph.launch(stream.get()) == cudaSuccess);
            CHECK(y.to_host() == std::vector<float>(8, 2.0f));
        }
        if (emulator::accesses_are_checked) {
            // Between two launches the memory is not present.
            CHECK_THROWS_AS(cuda::launch(copy, 1, 8, 0, stream.get(), scratch, y.data()), Error);
            expect_fault(FaultKind::out_of_bounds, {});
        }
    }
    CHECK(emulator::live_allocations().size() == before);
}

TEST_CASE("cuda emulator: branches of a capture are ordered by their events, also when the graph runs") {
    if (!test::accesses_are_checked()) return;
    const cuda::Stream stream;
    const cuda::Stream branch;
    const cuda::Event forked;
    const cuda::Event joined;
    const Buffer<float> x(std::vector<float>(8, 1.0f), stream.get());
    const Buffer<float> y(std::vector<float>(8, 1.0f), stream.get());
    for (const bool with_order : {true, false}) {
        begin(stream.get());
        forked.record(stream.get());
        forked.block(branch.get());
        cuda::launch(add, 1, 8, 0, branch.get(), x.data(), 1.0f);
        if (with_order) {
            joined.record(branch.get());
            joined.block(stream.get());
        }
        cuda::launch(copy, 1, 8, 0, stream.get(), x.data(), y.data());
        if (!with_order) {
            joined.record(branch.get());
            joined.block(stream.get());
        }
        const Graph graph(stream.get());
        if (with_order) {
            CHECK(graph.launch(stream.get()) == cudaSuccess);
            CHECK(y.to_host() == std::vector<float>(8, 2.0f));
        } else {
            CHECK(graph.launch(stream.get()) == cudaErrorLaunchFailure);
            expect_fault(FaultKind::missing_order, {"reads", "wrote"});
        }
    }
}

TEST_CASE("cuda emulator: what a capture does not allow is refused") {
    const cuda::Stream stream;
    const cuda::Stream branch;
    const cuda::Event event;
    cudaGraph_t graph = nullptr;
    void* memory = nullptr;
    CHECK(cudaStreamEndCapture(stream.get(), &graph) == cudaErrorIllegalState);
    begin(stream.get());
    CHECK(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal) == cudaErrorIllegalState);
    CHECK(cudaMalloc(&memory, 16) == cudaErrorStreamCaptureUnsupported);
    CHECK(cudaStreamSynchronize(stream.get()) == cudaErrorStreamCaptureUnsupported);
    CHECK(cudaStreamEndCapture(stream.get(), &graph) == cudaErrorStreamCaptureInvalidated);
    CHECK(graph == nullptr);
    // A branch that was not joined.
    begin(stream.get());
    event.record(stream.get());
    event.block(branch.get());
    CHECK(cudaStreamEndCapture(stream.get(), &graph) == cudaErrorStreamCaptureUnjoined);
    cudaStreamCaptureStatus status{};
    REQUIRE(cudaStreamIsCapturing(branch.get(), &status) == cudaSuccess);
    CHECK(status == cudaStreamCaptureStatusNone);
    CHECK(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal) == cudaErrorStreamCaptureUnsupported);
    cudaGetLastError();
}
