// Tensors: what they hold, how views share memory, how shapes broadcast, what errors look like.

#include <potluck.h>

#include <iostream>

using namespace potluck;

int main() {
    // A tensor is an n-dimensional array. Printing shows its elements as NumPy does.
    const Tensor a = tensor({{1, 2, 3}, {4, 5, 6}});
    std::cout << "a =\n" << a << "\n";
    std::cout << "shape " << to_string(a.shape()) << ", dtype " << name_of(a.dtype()) << ", on "
              << name_of(a.device()) << ", " << a.count() << " elements, " << a.bytes() << " bytes\n\n";

    // A view has its own shape and strides but shares the memory: nothing is copied.
    const Tensor column = a.select(1, 2);     // (2)
    const Tensor turned = a.transpose(0, 1);  // (3, 2)
    std::cout << "column 2 of a: " << column << ", stride " << column.strides()[0] << "\n";
    std::cout << "a turned has strides " << turned.strides()[0] << " and " << turned.strides()[1]
              << "; contiguous: " << std::boolalpha << turned.is_contiguous() << "\n";
    column.fill_(0);  // a trailing _ means: changed in place
    std::cout << "after column.fill_(0), a =\n" << a << "\n\n";

    // Shapes are aligned at the end; an axis of size 1 is broadcast. This makes no copy either.
    const Tensor row = tensor({10, 20, 30});             // (3)
    const Tensor tall = tensor({1, 2}).reshape({2, 1});  // (2, 1)
    std::cout << "a + row =\n" << a + row << "\n";
    std::cout << "row * tall =\n" << row * tall << "\n\n";  // (3) and (2, 1) give (2, 3)

    // Different types are promoted by a short rule: the higher kind wins, then the wider type.
    const Tensor integers = arange(0, 4);
    std::cout << "arange(0, 4) is " << name_of(integers.dtype()) << "; * 2 stays "
              << name_of((integers * 2).dtype()) << "; * 0.5 becomes " << name_of((integers * 0.5).dtype())
              << "\n";
    std::cout << "mean of it: " << mean(integers).item() << ", largest: " << max(integers).item<int>()
              << "\n\n";

    // Random numbers depend on the seed, not on the number of threads.
    manual_seed(42);
    const Tensor first = randn({2, 2});
    manual_seed(42);
    set_threads(1);
    const Tensor second = randn({2, 2});
    std::cout << "the same seed gives the same numbers: " << all(first == second).item<bool>() << "\n\n";

    // Matrix products, also of batches of matrices.
    const Tensor images = rand({16, 3, 8, 8});
    const Tensor weights = rand({8, 5});
    std::cout << "(16, 3, 8, 8) times (8, 5) is " << to_string(matmul(images, weights).shape()) << "\n\n";

    // Operands that do not fit are refused; the error shows the values and what to do.
    try {
        const Tensor wrong = matmul(rand({4, 3}), rand({5, 2}));
    } catch (const Error& error) {
        std::cout << "refused: " << error.what() << "\n";
    }
    std::cout << memory_statistics().current << " bytes are held by tensors now\n";
}
