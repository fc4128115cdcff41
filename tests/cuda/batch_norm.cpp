// Batch norm on the CUDA device against the CPU: the distribution of a channel over threads depends on the shape.

#include <doctest/doctest.h>

#include "autograd/ops/elementwise.h"
#include "core/backend.h"
#include "core/factories.h"
#include "tests/cuda/device.h"
#include "tests/cuda/difference.h"

namespace potluck::test {
namespace {

struct Results {
    Tensor mean, variance, reciprocal, y, dx, dweight, dbias;
};

Results normalise(Device device, const Tensor& given_x, const Tensor& given_weight, const Tensor& given_dy,
                  bool batch_statistics) {
    const Tensor x = given_x.to(device), weight = given_weight.to(device), dy = given_dy.to(device);
    const TensorOptions like{x.dtype(), device};
    const TensorOptions statistics{x.dtype() == DType::f64 ? DType::f64 : DType::f32, device};
    const Shape channels{x.size(1)};
    Results r{Tensor::empty(channels, statistics), Tensor::empty(channels, statistics),
              Tensor::empty(channels, statistics), Tensor::empty(x.shape(), like),
              Tensor::empty(x.shape(), like),      Tensor::empty(channels, like),
              Tensor::empty(channels, like)};
    backend(device).batch_norm_statistics(x, 1e-5, r.mean, r.variance, r.reciprocal);
    backend(device).batch_norm(x, weight, weight, r.mean, r.reciprocal, r.y);
    backend(device).batch_norm_backward(x, weight, r.mean, r.reciprocal, dy, batch_statistics, r.dx,
                                        r.dweight, r.dbias);
    return r;
}

}  // namespace

TEST_CASE("cuda batch_norm: agrees with the CPU for few and many channels, images and positions") {
    if (!has_cuda_device()) return;
    Generator generator(23);
    for (const Shape& shape :
         {Shape{64, 3, 50}, {200, 40, 1}, {3, 2, 5000}, {33, 5, 2}, {1, 1, 3}, {2, 70, 8}})
        for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16})
            for (const bool batch_statistics : {true, false}) {
                CAPTURE(to_string(shape));
                CAPTURE(name_of(dtype));
                CAPTURE(batch_statistics);
                const Tensor x = (randn(shape, {}, &generator) * 2.0 + 3.0).to(dtype);
                const Tensor dy = randn(shape, {}, &generator).to(dtype);
                const Tensor weight = randn({shape[1]}, {}, &generator).to(dtype);
                const Results expected = normalise(Device::cpu(), x, weight, dy, batch_statistics);
                const Results got = normalise(Device::cuda(), x, weight, dy, batch_statistics);
                const double exact = dtype == DType::f64 ? 1e-11 : 1e-5;
                const double rounded = size_of(dtype) == 2 ? 1e-2 : exact;
                CHECK(relative_difference(got.mean, expected.mean) <= exact);
                CHECK(relative_difference(got.variance, expected.variance) <= exact);
                CHECK(relative_difference(got.reciprocal, expected.reciprocal) <= exact);
                CHECK(relative_difference(got.y, expected.y) <= rounded);
                CHECK(relative_difference(got.dx, expected.dx) <= 2 * rounded);
                CHECK(relative_difference(got.dweight, expected.dweight) <= 2 * rounded);
                CHECK(relative_difference(got.dbias, expected.dbias) <= rounded);
            }
}

TEST_CASE("cuda batch_norm: a large mean does not drown the deviation") {
    if (!has_cuda_device()) return;
    const Tensor x = tensor(std::vector<double>{20000, 20001, 19999, 20004}, {1, 1, 4});
    const Results r = normalise(Device::cuda(), x, ones({1}), ones({1, 1, 4}), true);
    CHECK(r.variance.item() == doctest::Approx(3.5));
    CHECK(r.mean.item() == doctest::Approx(20001.0));
}

TEST_CASE("cuda batch_norm: a view with gaps gives what its copy gives") {
    if (!has_cuda_device()) return;
    Generator generator(1);
    const Tensor whole = randn({4, 6, 10}, {}, &generator).to(Device::cuda());
    const Tensor view = whole.alias({4, 5, 3}, {60, 10, 3}, 2), copy = view.contiguous();
    const TensorOptions like{DType::f32, Device::cuda()};
    for (const Tensor& x : {view, copy}) {
        Tensor mean = Tensor::empty({5}, like), variance = Tensor::empty({5}, like),
               reciprocal = Tensor::empty({5}, like);
        backend(Device::cuda()).batch_norm_statistics(x, 1e-5, mean, variance, reciprocal);
        Tensor expected = Tensor::empty({5}, {});
        Tensor host_variance = Tensor::empty({5}, {}), host_reciprocal = Tensor::empty({5}, {});
        backend(Device::cpu())
            .batch_norm_statistics(copy.to(Device::cpu()), 1e-5, expected, host_variance, host_reciprocal);
        CHECK(relative_difference(mean, expected) <= 1e-5);
        CHECK(relative_difference(variance, host_variance) <= 1e-5);
    }
}

}  // namespace potluck::test
