#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/random.h"
#include "core/tensor.h"
#include "nn/module.h"

namespace potluck {

/// What an update may change besides what the optimizer does, as it was before: the module's buffers (running statistics) and
/// the default generators. For an update that does not take place.
class StateBefore {
public:
    /// A buffer of the module and what was in it.
    struct BufferCopy {
        Tensor buffer, values;
        std::uint64_t version = 0;  // of its storage at that time
        bool is_saved = false;

        bool was_written() const { return buffer.storage()->version() != version; }
    };

    /// `kept` are the copies of the update before, and then those of this one: tables that can be computed again (unsaved
    /// buffers) hardly ever change, so they are copied anew only when somebody wrote to them.
    StateBefore(nn::Module& module, std::span<const Tensor> parameters, std::vector<BufferCopy>& kept);
    void restore();

private:
    nn::Module& module_;
    GeneratorStates generators_;
    std::vector<BufferCopy> copies_;
};

}  // namespace potluck
