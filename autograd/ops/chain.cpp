#include "autograd/ops/chain.h"

#include "autograd/ops/support.h"
#include "core/backend.h"
#include "core/op_scope.h"

namespace potluck::detail {

Tensor chain(std::initializer_list<Tensor> inputs, std::initializer_list<ChainStep> steps) {
    const char* op = OpScope::current();
    require_same_device(op, inputs);
    DType dtype = inputs.begin()->dtype();
    Shape shape;
    for (const Tensor& x : inputs) {
        dtype = promote(dtype, x.dtype());
        shape = broadcast_shapes(op, shape, x.shape());
    }
    std::vector<Tensor> operands;
    for (const Tensor& x : inputs) operands.push_back(cast(x, dtype).broadcast_alias(op, shape));
    Tensor y = Tensor::empty(shape, {dtype, operands[0].device()});
    backend(y.device()).chain(operands, steps, y);
    return y;
}

}  // namespace potluck::detail
