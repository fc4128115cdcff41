#include "nn/train/matmul_rate.h"

#include <doctest/doctest.h>

#include "autograd/ops/matmul.h"
#include "core/error.h"
#include "core/factories.h"
#include "core/memory.h"
#include "core/random.h"
#include "nn/layers/linear.h"
#include "nn/train/copy_rate.h"

namespace potluck::test {

TEST_CASE("matmul rate: is that of the dtype which is asked for, and of a product that takes milliseconds") {
    for (const DType dtype : {DType::f32, DType::bf16}) {
        manual_seed(3);
        const RandomKey before = default_generator(Device::cpu()).state();
        const MatmulRate rate = measure_matmul_rate(dtype, Device::cpu());
        CHECK(rate.dtype == dtype);
        CHECK(rate.flops_per_second > 1e7);
        CHECK(rate.flops_per_second < 1e16);
        CHECK(rate.size >= 512);
        CHECK(default_generator(Device::cpu()).state().offset == before.offset);
    }
    CHECK_THROWS_WITH_AS(measure_matmul_rate(DType::i64, Device::cpu()),
                         "[measure_matmul_rate] the dtype is i64. Give a floating one.", Error);
}

TEST_CASE("copy rate: is that of a tensor of megabytes, and draws no random numbers") {
    manual_seed(3);
    const RandomKey before = default_generator(Device::cpu()).state();
    const CopyRate rate = measure_copy_rate(Device::cpu());
    CHECK(rate.bytes_per_second > 1e7);
    CHECK(rate.bytes_per_second < 1e14);
    CHECK(rate.size >= 4 << 20);
    CHECK(default_generator(Device::cpu()).state().offset == before.offset);
    CHECK(memory_statistics().current < rate.size);
}

TEST_CASE("matmul rate: a model's dtype is that of most of its parameters, counted by elements") {
    class TwoTypes : public nn::Module {
    public:
        nn::Linear wide{8, 8}, first{2, 2}, second{2, 2};
        TwoTypes() { wide.to(DType::bf16); }
        void members(nn::Members& m) override { m("wide", wide)("first", first)("second", second); }
    };
    CHECK(dtype_of_most_parameters(TwoTypes()) == DType::bf16);
    CHECK(dtype_of_most_parameters(nn::Linear(3, 3)) == DType::f32);
}

}  // namespace potluck::test
