#include "autograd/ops/pooling.h"

#include "autograd/ops/index.h"
#include "autograd/ops/support.h"
#include "autograd/ops/support_window.h"
#include "autograd/ops/view.h"
#include "autograd/tape.h"
#include "core/backend.h"
#include "core/factories.h"
#include "core/op_scope.h"

namespace potluck {

namespace {

void check(const char* name, const Tensor& x, std::int64_t ndim) {
    detail::require_defined(name, x, "x");
    detail::require_floating(name, x, "x");
    detail::require_image(name, x, ndim);
}

std::int64_t checked_windows(const char* name, const Tensor& x, const detail::WindowAxis& axis) {
    const std::int64_t windows = detail::windows_along(name, x.shape(), axis);
    detail::require_elements(name, x.shape(), axis, windows);
    return windows;
}

/// Pools x (batch, channels, height, width) to `shape`.
using Pool = Tensor (*)(const char* name, const Tensor& x, const Shape& shape, const PoolSpec& options);

/// Treats x (batch, channels, length) as images of height 1.
Tensor pool1d(const char* name, Pool pool, const Tensor& x, std::int64_t kernel, const Pooling1d& given) {
    const OpScope scope(name);
    check(name, x, 3);
    const std::int64_t stride = given.stride == 0 ? kernel : given.stride;
    const std::int64_t windows = checked_windows(
        name, x, {"length", x.size(2), kernel, stride, given.padding, given.dilation, given.ceil_mode});
    const PoolSpec options{{.stride = detail::as_pair(1, stride),
                            .padding = detail::as_pair(0, given.padding),
                            .dilation = detail::as_pair(1, given.dilation)},
                           detail::as_pair(1, kernel),
                           given.count_padding};
    return squeeze(pool(name, unsqueeze(x, 2), {x.size(0), x.size(1), 1, windows}, options), 2);
}

Tensor pool2d(const char* name, Pool pool, const Tensor& x, HeightWidth kernel, const Pooling2d& given) {
    const OpScope scope(name);
    check(name, x, 4);
    const HeightWidth stride{given.stride.height == 0 ? kernel.height : given.stride.height,
                             given.stride.width == 0 ? kernel.width : given.stride.width};
    const std::int64_t height =
        checked_windows(name, x,
                        {"height", x.size(2), kernel.height, stride.height, given.padding.height,
                         given.dilation.height, given.ceil_mode});
    const std::int64_t width = checked_windows(name, x,
                                               {"width", x.size(3), kernel.width, stride.width,
                                                given.padding.width, given.dilation.width, given.ceil_mode});
    const PoolSpec options{{.stride = detail::as_pair(stride),
                            .padding = detail::as_pair(given.padding),
                            .dilation = detail::as_pair(given.dilation)},
                           detail::as_pair(kernel),
                           given.count_padding};
    return pool(name, x, {x.size(0), x.size(1), height, width}, options);
}

Tensor max_pool(const char* name, const Tensor& x, const Shape& shape, const PoolSpec& options) {
    Tensor y = detail::empty_if(true, shape, x);
    Tensor indices = Tensor::empty(shape, {DType::i64, x.device()});
    backend(x.device()).max_pool(x, options, y, indices);
    return record(
        name, y, {x}, {indices},
        [x_shape = x.shape(), options](const Saved& saved, const Tensor& dy, Gradients& dx) {
            const Tensor indices = saved[0];
            if (!is_grad_enabled()) {
                Tensor dinput = detail::empty_if(true, x_shape, dy);
                backend(dy.device()).max_pool_backward(indices, dy, options, dinput);
                return dx.add(0, dinput);
            }
            const std::int64_t planes = x_shape[0] * x_shape[1];
            const Shape as_rows{planes, dy.size(2) * dy.size(3)};
            const Tensor start = zeros({planes, x_shape[2] * x_shape[3]}, {dy.dtype(), dy.device()});
            dx.add(0,
                   reshape(scatter_add(start, 1, reshape(indices, as_rows), reshape(dy, as_rows)), x_shape));
        });
}

Tensor average_pool_gradient(const Tensor& dy, const Shape& shape, const PoolSpec& options);

Tensor average_pool(const char* name, const Tensor& x, const Shape& shape, const PoolSpec& options) {
    Tensor y = detail::empty_if(true, shape, x);
    backend(x.device()).average_pool(x, options, y);
    return record(name, y, {x}, {},
                  [x_shape = x.shape(), options](const Saved&, const Tensor& dy, Gradients& dx) {
                      dx.add(0, average_pool_gradient(dy, x_shape, options));
                  });
}

/// Linear in dy, so its own gradient is average pooling again.
Tensor average_pool_gradient(const Tensor& dy, const Shape& shape, const PoolSpec& options) {
    Tensor y = detail::empty_if(true, shape, dy);
    backend(dy.device()).average_pool_backward(dy, options, y);
    return record("average_pool_gradient", y, {dy}, {},
                  [dy_shape = dy.shape(), options](const Saved&, const Tensor& g, Gradients& dx) {
                      dx.add(0, average_pool("average_pool", g, dy_shape, options));
                  });
}

}  // namespace

Tensor max_pool1d(const Tensor& x, std::int64_t kernel, const Pooling1d& options) {
    return pool1d("max_pool1d", max_pool, x, kernel, options);
}

Tensor max_pool2d(const Tensor& x, HeightWidth kernel, const Pooling2d& options) {
    return pool2d("max_pool2d", max_pool, x, kernel, options);
}

Tensor average_pool1d(const Tensor& x, std::int64_t kernel, const Pooling1d& options) {
    return pool1d("average_pool1d", average_pool, x, kernel, options);
}

Tensor average_pool2d(const Tensor& x, HeightWidth kernel, const Pooling2d& options) {
    return pool2d("average_pool2d", average_pool, x, kernel, options);
}

}  // namespace potluck
