#pragma once

// Tests on every device: the same body runs on each, and the factories below create their tensors on that device.
//
//     TEST_CASE("relu: has gradient 0 at 0") {
//         on_each_device([] {
//             Tensor x = tensor({0.0, -1.0, 2.0});  // on the device under test
//             ...
//         });
//     }
//
// In namespace potluck::test these factories hide those of core/factories.h. Random factories take the device from
// their options: randn({3}, {DType::f32, test_device()}, &generator).

#include <functional>
#include <initializer_list>
#include <vector>

#include "core/factories.h"

namespace potluck::test {

/// The CPU, and the first CUDA device if the build and the machine have one; or the device named by the environment
/// variable POTLUCK_TEST_DEVICE (cpu:1 is created on demand).
std::vector<Device> devices();

/// The device that the running test is on: the CPU outside of on_each_device() and OnDevice.
Device test_device();

/// Makes a device the one under test while the object lives.
class OnDevice {
public:
    explicit OnDevice(Device device);
    ~OnDevice();
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

private:
    Device before_;
};

/// Runs `body` once for each of devices(); failures are reported with the device's name.
void on_each_device(const std::function<void()>& body);

inline TensorOptions on_test_device(TensorOptions options) { return {options.dtype, test_device()}; }

inline Tensor zeros(const Shape& shape, TensorOptions options = {}) {
    return potluck::zeros(shape, on_test_device(options));
}
inline Tensor ones(const Shape& shape, TensorOptions options = {}) {
    return potluck::ones(shape, on_test_device(options));
}
inline Tensor full(const Shape& shape, const Scalar& value, TensorOptions options = {}) {
    return potluck::full(shape, value, on_test_device(options));
}
inline Tensor arange(const Scalar& start, const Scalar& end, const Scalar& step = 1,
                     TensorOptions options = {DType::i64}) {
    return potluck::arange(start, end, step, on_test_device(options));
}
template <class Number>
requires std::is_arithmetic_v<Number> Tensor tensor(Number value, TensorOptions options = {}) {
    return potluck::tensor(value, on_test_device(options));
}
inline Tensor tensor(std::initializer_list<potluck::detail::Nested> list, TensorOptions options = {}) {
    return potluck::tensor(list, on_test_device(options));
}
inline Tensor tensor(const std::vector<double>& values, const Shape& shape, TensorOptions options = {}) {
    return potluck::tensor(values, shape, on_test_device(options));
}
template <Element T>
Tensor tensor(const std::vector<T>& values, const Shape& shape, TensorOptions options = {dtype_of<T>()}) {
    return potluck::tensor(values, shape, on_test_device(options));
}

}  // namespace potluck::test
