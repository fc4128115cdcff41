#include "nn/train/gradient_buffers.h"

#include "autograd/tape.h"
#include "core/dtype.h"
#include "core/factories.h"

namespace potluck {

std::vector<Tensor> add_gradient_buffers(std::span<const Tensor> parameters) {
    std::vector<Tensor> given;
    for (const Tensor& parameter : parameters) {
        if (!is_half(parameter.dtype()) || !parameter.requires_grad() ||
            parameter.node()->gradient_buffer.defined())
            continue;
        set_gradient_buffer(parameter, empty(parameter.shape(), {DType::f32, parameter.device()}));
        given.push_back(parameter);
    }
    return given;
}

}  // namespace potluck
