#pragma once

// Internal: curves over the steps of a run, however long it is.

#include <cstdint>
#include <vector>

namespace potluck {

/// Values over steps, thinned out as they come: so many steps as needed share a bucket, which knows the smallest, the
/// largest and the mean of its values. A run of any length takes the same memory, and no spike is lost.
class Curve {
public:
    static constexpr std::size_t most_buckets = 512;

    struct Bucket {
        std::int64_t number = 0;  // it holds the steps number * width .. number * width + width - 1
        double smallest = 0.0, largest = 0.0, sum = 0.0;
        std::int64_t count = 0;
        std::int64_t first_step = 0, last_step = 0;  // that have a value

        double mean() const { return sum / static_cast<double>(count); }
        double middle() const { return 0.5 * static_cast<double>(first_step + last_step); }
    };

    /// Steps must not fall. A value that is not finite is only counted.
    void add(std::int64_t step, double value);

    bool empty() const { return buckets_.empty(); }
    /// In the order of the steps; none is empty.
    const std::vector<Bucket>& buckets() const { return buckets_; }
    std::int64_t width() const { return width_; }  // steps of a bucket, a power of two
    double last() const { return last_; }          // the last finite value
    std::int64_t left_out() const { return left_out_; }

private:
    std::vector<Bucket> buckets_;
    std::int64_t width_ = 1;
    double last_ = 0.0;
    std::int64_t left_out_ = 0;
};

}  // namespace potluck
