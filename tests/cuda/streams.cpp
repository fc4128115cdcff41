// Copies that run concurrently with the computation of a CUDA device, and memory that several streams use.

#include <doctest/doctest.h>

#include <memory>
#include <vector>

#include "autograd/ops.h"
#include "core/async_copy.h"
#include "core/device_registry.h"
#include "core/factories.h"
#include "core/memory.h"
#include "cuda/cuda_backend.h"
#include "cuda/options.h"
#include "tests/cuda/device.h"
#if POTLUCK_CUDA_EMULATED
#include "tests/cuda/emulator_support.h"
#endif

using namespace potluck;

namespace {

const Device gpu = Device::cuda();

/// Another GPU, which the emulator adds; cuda:0 if this machine has only one.
Device second_gpu() {
#if POTLUCK_CUDA_EMULATED
    if (emulator::devices() == 1) {
        emulator::configure(2, std::int64_t{8} << 30);
        register_device(Device::cuda(1), std::make_unique<CudaBackend>(1));
    }
#endif
    for (const Device device : registered_devices())
        if (device == Device::cuda(1)) return device;
    return gpu;
}

Tensor pinned(const Shape& shape) { return Tensor::empty(shape, {.dtype = DType::f32, .pinned = true}); }

std::vector<double> counted(std::int64_t count, double from = 0) {
    std::vector<double> values(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = from + static_cast<double>(i);
    return values;
}

constexpr std::int64_t many = 3'000'001;  // needs several pieces of staging

}  // namespace

TEST_CASE("cuda streams: a pinned tensor goes to the device and back beside the host") {
    if (!test::has_cuda_device()) return;
    for (const std::int64_t count : {std::int64_t{1}, std::int64_t{1000}, many}) {
        const Tensor from = pinned({count});
        for (std::int64_t i = 0; i < count; ++i) from.data<float>()[i] = static_cast<float>(i % 1000);
        const Tensor there = Tensor::empty({count}, {DType::f32, gpu});
        const CopyHandle up = copy_async(from, there);
        up.wait_on();
        const Tensor twice = there * 2.0;
        const Tensor back = pinned({count});
        CopyHandle down = copy_async(twice, back);  // after the product, without explicit synchronisation
        down.wait();
        CHECK(down.is_done());
        CHECK(back.data<float>()[count - 1] == 2.0F * from.data<float>()[count - 1]);
        CHECK(back.to_vector() == twice.to_vector());
    }
}

TEST_CASE("cuda streams: memory of the host that is not pinned is copied before the function returns") {
    if (!test::has_cuda_device()) return;
    Tensor from = tensor(counted(1000), {1000});
    const Tensor there = Tensor::empty({1000}, {DType::f32, gpu});
    CopyHandle up = copy_async(from, there);
    from.data<float>()[7] = -1;  // the copy has the old value
    up.wait_on(StreamKind::communication);
    const Tensor back = Tensor::empty({1000});
    copy_async(there, back, StreamKind::communication).wait();
    CHECK(back.to_vector() == counted(1000));
}

TEST_CASE("cuda streams: each kind of stream can copy, and each can be made to wait") {
    if (!test::has_cuda_device()) return;
    for (const StreamKind copying : {StreamKind::compute, StreamKind::communication, StreamKind::copy})
        for (const StreamKind next : {StreamKind::compute, StreamKind::communication, StreamKind::copy}) {
            const Tensor x = tensor(counted(500), {500}, {DType::f32, gpu}) + 1.0;
            const Tensor y = Tensor::empty({500}, {DType::f32, gpu});
            const Tensor z = Tensor::empty({500}, {DType::f32, gpu});
            copy_async(x, y, copying).wait_on(next);
            copy_async(y, z, next).wait_on();
            CHECK((z * 1.0).to_vector() == counted(500, 1));
        }
    synchronize(gpu);
}

TEST_CASE("cuda streams: tensors may die while they are copied") {
    if (!test::has_cuda_device()) return;
    const Tensor back = pinned({1000});
    for (int round = 0; round < 20; ++round) {
#if POTLUCK_CUDA_EMULATED
        emulator::set_late_answers(round % 2 == 1);
#endif
        Tensor x = full({1000}, round, {DType::f32, gpu}) + 1.0;
        CopyHandle down = copy_async(x, back);
        x = Tensor();
        // Memory of the same size is allocated immediately, written, and freed.
        for (int i = 0; i < 3; ++i) (void)full({1000}, -5, {DType::f32, gpu});
        down.wait();
        CHECK(back.data<float>()[0] == static_cast<float>(round + 1));
        CHECK(back.data<float>()[999] == static_cast<float>(round + 1));

        Tensor host = full({1000}, round, {.pinned = true});
        const Tensor there = Tensor::empty({1000}, {DType::f32, gpu});
        {
            const CopyHandle dropped = copy_async(host, there);
            dropped.wait_on();
        }
        host = Tensor();
        for (int i = 0; i < 3; ++i) (void)full({1000}, -5, {.pinned = true});
        CHECK(there.to_vector() == std::vector<double>(1000, round));
    }
#if POTLUCK_CUDA_EMULATED
    emulator::set_late_answers(false);
#endif
    release_cached_memory(gpu);
    release_cached_memory();
}

TEST_CASE("cuda streams: from one GPU to another, directly and by way of the host") {
    if (!test::has_cuda_device()) return;
    const Device other = second_gpu();
    const auto check = [&](std::int64_t count) {
        const Tensor x = tensor(counted(count), {count}, {DType::f64, gpu}) * 2.0;
        const Tensor y = x.to(other);
        CHECK(y.device() == other);
        const Tensor z = (y + 1.0).to(gpu);
        const std::vector<double> values = z.to_vector();
        CHECK(values.front() == 1.0);
        CHECK(values.back() == 2.0 * static_cast<double>(count - 1) + 1.0);
        const Tensor target = Tensor::empty({count}, {DType::f64, other});
        copy_async(x, target).wait_on();
        CHECK((target * 0.5).to_vector() == counted(count));
    };
    for (const std::int64_t count : {std::int64_t{1}, std::int64_t{999}, many}) check(count);
#if POTLUCK_CUDA_EMULATED
    // Devices without peer access. (Backends remember the result of the query, so these are new.)
    emulator::set_peer_access(false);
    const int first = emulator::devices();
    emulator::configure(first + 2, std::int64_t{8} << 30);
    const Device a = Device::cuda(first);
    const Device b = Device::cuda(first + 1);
    for (const Device device : {a, b}) register_device(device, std::make_unique<CudaBackend>(device.index));
    for (const std::int64_t count : {std::int64_t{1}, std::int64_t{999}, many}) {
        const Tensor x = tensor(counted(count), {count}, {DType::f64, a}) * 2.0;
        const Tensor y = x.to(b) + 1.0;
        const std::vector<double> values = y.to_vector();
        CHECK(values.front() == 1.0);
        CHECK(values.back() == 2.0 * static_cast<double>(count - 1) + 1.0);
        const Tensor target = Tensor::empty({count}, {DType::f64, a});
        copy_async(y, target, StreamKind::communication).wait_on();
        CHECK((target - 1.0).to_vector() == x.to_vector());
    }
    emulator::set_peer_access(true);
    test::expect_no_fault();
#endif
}

TEST_CASE("cuda streams: options belong to one device") {
    if (!test::has_cuda_device()) return;
    const Device other = second_gpu();
    if (other == gpu) return;
    cuda::set_tf32(true, other);
    CHECK(cuda::tf32(other));
    CHECK_FALSE(cuda::tf32());
    cuda::set_tf32(false, other);
    CHECK_THROWS_WITH_AS(cuda::set_tf32(true, Device::cpu()), doctest::Contains("cpu is no CUDA device"),
                         Error);
}

#if POTLUCK_CUDA_EMULATED
TEST_CASE("cuda streams: what reads a tensor before its copy was waited for is seen") {
    if (!test::has_cuda_device()) return;
    const Tensor from = full({1000}, 3, {.pinned = true});
    const Tensor there = Tensor::empty({1000}, {DType::f32, gpu});
    const CopyHandle up = copy_async(from, there);
    const Tensor other = Tensor::empty({1000}, {DType::f32, gpu});
    CHECK_THROWS_AS(copy_async(there, other, StreamKind::communication), Error);
    test::expect_fault(test::FaultKind::missing_order, {"reads byte 0", "which cudaMemcpyAsync", "wrote"});
    up.wait_on();
    CHECK((there * 2.0).to_vector() == std::vector<double>(1000, 6.0));

    // The host reads NaN where the values have not arrived yet.
    const Tensor back = full({1000}, 5, {.pinned = true});
    CopyHandle down = copy_async(there, back);
    CHECK(back.data<float>()[0] != back.data<float>()[0]);
    down.wait();
    CHECK(back.data<float>()[0] == 3.0F);
}
#endif
