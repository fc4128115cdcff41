// The emulator's checks of pinned memory: values that have not arrived yet, sources that change too early, and memory
// that is freed during a copy.

#include <cstring>
#include <vector>

#include "core/op_scope.h"
#include "cuda/runtime.h"
#include "tests/cuda/emulator_support.h"

using namespace potluck;
using potluck::test::Buffer;
using potluck::test::expect_fault;
using potluck::test::expect_no_fault;
using potluck::test::FaultKind;

namespace {

constexpr std::size_t count = 100;
constexpr std::size_t bytes = count * sizeof(float);

void copy(void* to, const void* from, const cuda::Stream& stream) {
    cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream.get()), "cudaMemcpyAsync");
}

}  // namespace

TEST_CASE("cuda emulator: values reach pinned memory when the host waits for them") {
    const cuda::Stream stream;
    const Buffer<float> x(std::vector<float>(count, 4.0f), stream.get());
    const cuda::PinnedMemory host(bytes);
    auto* values = static_cast<float*>(host.data());
    values[0] = 1.0f;
    copy(host.data(), x.data(), stream);
    CHECK(values[0] != values[0]);
    const cuda::Event end;
    end.record(stream.get());
    emulator::set_late_answers(true);
    CHECK_FALSE(end.is_done());
    CHECK(values[0] != values[0]);
    CHECK(end.is_done());  // asked again
    emulator::set_late_answers(false);
    CHECK(values[0] == 4.0f);
    copy(host.data(), x.data(), stream);
    stream.synchronize();
    CHECK(values[count - 1] == 4.0f);
    expect_no_fault();
}

TEST_CASE("cuda emulator: pinned memory passes values from stream to stream that wait for each other") {
    const cuda::Stream first;
    const cuda::Stream second;
    const Buffer<float> x(std::vector<float>(count, 4.0f), first.get());
    const Buffer<float> y(count, second.get());
    const cuda::PinnedMemory host(bytes);
    const cuda::Event filled;
    copy(host.data(), x.data(), first);
    CHECK(cudaMemcpyAsync(y.data(), host.data(), bytes, cudaMemcpyDefault, second.get()) != cudaSuccess);
    expect_fault(FaultKind::missing_order, {"reads pinned memory", "cudaMemcpyAsync"});
    filled.record(first.get());
    filled.block(second.get());
    copy(y.data(), host.data(), second);
    CHECK(y.to_host() == std::vector<float>(count, 4.0f));
    first.synchronize();
    expect_no_fault();
}

TEST_CASE("cuda emulator: the source of a copy must stay as it is until the copy was waited for") {
    const cuda::Stream stream;
    const Buffer<float> x(count, stream.get());
    const cuda::PinnedMemory host(bytes);
    std::memset(host.data(), 0, bytes);
    copy(x.data(), host.data(), stream);
    static_cast<float*>(host.data())[3] = 1.0f;
    stream.synchronize();
    expect_fault(FaultKind::missing_order, {"the host changed pinned memory"});
    copy(x.data(), host.data(), stream);
    stream.synchronize();
    static_cast<float*>(host.data())[3] = 2.0f;
    stream.synchronize();
    expect_no_fault();
}

TEST_CASE("cuda emulator: pinned memory is not freed while a copy may run on it") {
    const cuda::Stream stream;
    const Buffer<float> x(count, stream.get());
    for (const bool waits : {true, false}) {
        {
            const cuda::PinnedMemory host(bytes);
            std::memset(host.data(), 0, bytes);
            copy(x.data(), host.data(), stream);
            if (waits) stream.synchronize();
        }
        if (waits)
            expect_no_fault();
        else
            expect_fault(FaultKind::use_after_free, {"cudaFreeHost", "cudaMemcpyAsync", "may still run"});
    }
}

TEST_CASE("cuda emulator: memory is not freed in one stream while another uses it") {
    const cuda::Stream first;
    const cuda::Stream second;
    const cuda::PinnedMemory host(bytes);
    std::memset(host.data(), 0, bytes);
    for (const bool waits : {true, false}) {
        Buffer<float> x(count, first.get());
        first.synchronize();
        copy(x.data(), host.data(), second);
        const cuda::Event end;
        end.record(second.get());
        if (waits) end.block(first.get());
        x.free();
        if (waits)
            expect_no_fault();
        else
            expect_fault(FaultKind::missing_order, {"cudaFreeAsync", "cudaMemcpyAsync"});
        second.synchronize();
    }
}
