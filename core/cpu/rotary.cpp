#include "core/cpu/rows.h"

namespace potluck::cpu {

void rotary(const Tensor& x, const Tensor& cosine, const Tensor& sine, bool inverse, Tensor& y) {
    if (y.count() == 0) return;
    const std::int64_t time = x.size(2);
    const std::int64_t width = x.size(3);
    const std::int64_t half = width / 2;
    visit_floating_compute(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const T sign = inverse ? T{-1} : T{1};
        parallel_for(x.count() / width, rows_per_piece(width), [&](std::int64_t first, std::int64_t last) {
            RowReader<T> reader(x);
            RowReader<T> cosine_reader(cosine);
            RowReader<T> sine_reader(sine);
            RowWriter<T> writer(y);
            for (std::int64_t row = first; row < last; ++row) {
                const T* from = reader.read(row);
                const T* c = cosine_reader.read(row % time);
                const T* s = sine_reader.read(row % time);
                T* to = writer.begin(row);
                for (std::int64_t i = 0; i < half; ++i) {
                    const T a = from[i];
                    const T b = from[i + half];
                    to[i] = a * c[i] - b * (sign * s[i]);
                    to[i + half] = b * c[i] + a * (sign * s[i]);
                }
                writer.end();
            }
        });
    });
}

}  // namespace potluck::cpu
