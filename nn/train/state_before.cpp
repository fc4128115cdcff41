#include "nn/train/state_before.h"

#include <algorithm>
#include <string>

#include "autograd/grad_mode.h"
#include "nn/module_tree.h"

namespace potluck {

StateBefore::StateBefore(nn::Module& module, std::span<const Tensor> parameters,
                         std::vector<BufferCopy>& kept)
    : module_(module), generators_(generator_states(parameters)) {
    const NoGrad guard;
    nn::for_each_member(module, [&](const nn::Member& member, const std::string&, std::size_t) {
        if (member.kind != nn::Member::Kind::buffer && member.kind != nn::Member::Kind::unsaved_buffer)
            return;
        const Tensor& buffer = *member.tensor;
        const auto is_this = [&](const BufferCopy& copy) { return copy.buffer.is_same(buffer); };
        if (std::any_of(copies_.begin(), copies_.end(), is_this)) return;
        const auto before = std::find_if(kept.begin(), kept.end(), is_this);
        if (before != kept.end() && !before->is_saved && !before->was_written()) {
            copies_.push_back(*before);
            return;
        }
        copies_.push_back({.buffer = buffer,
                           .values = buffer.clone(),
                           .version = buffer.storage()->version(),
                           .is_saved = member.kind == nn::Member::Kind::buffer});
    });
    kept = copies_;
}

void StateBefore::restore() {
    const NoGrad guard;
    for (const BufferCopy& copy : copies_)
        if (copy.is_saved || copy.was_written()) copy.buffer.copy_(copy.values);
    set_generator_states(generators_);
    // A module may also have put another tensor in the place of its buffer.
    std::size_t next = 0;
    module_.replace_tensors([&](const Tensor& tensor, nn::Member::Kind kind) {
        return kind != nn::Member::Kind::parameter && next < copies_.size() ? copies_[next++].buffer : tensor;
    });
}

}  // namespace potluck
