#include "nn/train/curve.h"

#include <algorithm>
#include <cmath>

namespace potluck {
namespace {

void join(Curve::Bucket& bucket, const Curve::Bucket& next) {
    bucket.smallest = std::min(bucket.smallest, next.smallest);
    bucket.largest = std::max(bucket.largest, next.largest);
    bucket.sum += next.sum;
    bucket.count += next.count;
    bucket.last_step = next.last_step;
}

}  // namespace

void Curve::add(std::int64_t step, double value) {
    if (!std::isfinite(value)) {
        ++left_out_;
        return;
    }
    last_ = value;
    const Bucket one{step / width_, value, value, value, 1, step, step};
    if (!buckets_.empty() && buckets_.back().number == one.number) return join(buckets_.back(), one);
    buckets_.push_back(one);
    if (buckets_.size() <= most_buckets) return;
    width_ *= 2;
    std::size_t kept = 0;
    for (std::size_t i = 0; i < buckets_.size(); ++i) {
        Bucket bucket = buckets_[i];
        bucket.number /= 2;
        if (kept > 0 && buckets_[kept - 1].number == bucket.number)
            join(buckets_[kept - 1], bucket);
        else
            buckets_[kept++] = bucket;
    }
    buckets_.resize(kept);
}

}  // namespace potluck
