#include "nn/train/checkpoint_writer.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <utility>
#include <vector>

#include "core/async_copy.h"
#include "core/backend.h"
#include "core/copies.h"
#include "core/format.h"
#include "core/memory.h"
#include "core/op_scope.h"

namespace potluck {
namespace {

/// Bytes from the start of one tensor to the start of the next.
std::int64_t room_for(const Tensor& tensor) {
    constexpr std::int64_t alignment = 64;
    return (tensor.bytes() + alignment - 1) / alignment * alignment;
}

/// Calls visit(tensor) for all tensors of a checkpoint.
template <class Content, class Visit>
void for_each_tensor(Content& content, Visit&& visit) {
    for (auto* tensors : {&content.model, &content.optimizer})
        for (auto& [name, tensor] : *tensors) visit(tensor);
}

/// Puts a copy in `memory` in the place of each tensor. Returns the copies that are still under way.
std::vector<CopyHandle> copy_into(const Tensor& memory, CheckpointContent& content) {
    std::vector<CopyHandle> copies;
    std::int64_t offset = 0;
    for_each_tensor(content, [&](Tensor& tensor) {
        Tensor copy = Tensor::view_of(memory.storage(), tensor.dtype(), tensor.shape(),
                                      contiguous_strides(tensor.shape()), offset / size_of(tensor.dtype()));
        offset += room_for(tensor);
        if (tensor.device().is_cpu())
            backend(tensor.device()).copy(tensor, copy);  // by all threads of the device
        else
            copies.push_back(copy_async(detail::as_contiguous(tensor), copy));
        tensor = std::move(copy);
    });
    // The next update changes the tensors in place.
    for (const CopyHandle& copy : copies) copy.wait_on(StreamKind::compute);
    return copies;
}

}  // namespace

CheckpointWriter::CheckpointWriter(std::string folder, std::int64_t keep, Warn warn)
    : folder_(std::move(folder)), keep_(keep), warn_(std::move(warn)) {
    if (keep < 0) throw Error("save_checkpoint", fmt::format("keep is {}. It must not be negative.", keep));
}

CheckpointWriter::~CheckpointWriter() {
    try {
        wait();
    } catch (const std::exception& error) {
        try {
            warn(fmt::format("the last checkpoint was not saved: {}", error.what()));
        } catch (...) {  // nothing is left to say it with
        }
    }
}

void CheckpointWriter::save(const nn::Module& module, const optim::Optimizer& optimizer,
                            const TrainingState& state) {
    wait();
    const OpScope scope("checkpoint_writer");
    CheckpointContent content = checkpoint_content(module, optimizer, state);
    if (!take_memory(content)) {
        complete_ = write_checkpoint(folder_, content, keep_);
        return;
    }
    std::vector<CopyHandle> copies = copy_into(memory_, content);
    // The thread touches the copy alone: no module, no generator, no tape.
    writing_ = std::async(std::launch::async, [folder = folder_, keep = keep_, content = std::move(content),
                                               copies = std::move(copies)]() mutable {
        for (CopyHandle& copy : copies) copy.wait();
        return write_checkpoint(folder, content, keep);
    });
}

std::string CheckpointWriter::save_and_wait(const nn::Module& module, const optim::Optimizer& optimizer,
                                            const TrainingState& state) {
    wait();
    return complete_ = write_checkpoint(folder_, checkpoint_content(module, optimizer, state), keep_);
}

bool CheckpointWriter::is_writing() const {
    return writing_.valid() && writing_.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
}

void CheckpointWriter::poll() {
    if (!is_writing()) wait();
}

std::string CheckpointWriter::wait() {
    if (writing_.valid()) complete_ = writing_.get();
    return complete_;
}

/// Whether memory_ holds the content. Says once why it does not.
bool CheckpointWriter::take_memory(const CheckpointContent& content) {
    std::int64_t bytes = 0;
    bool pinned = false;
    for_each_tensor(content, [&](const Tensor& tensor) {
        bytes += room_for(tensor);
        pinned = pinned || !tensor.device().is_cpu();
    });
    if (memory_.defined() && memory_.bytes() >= bytes && memory_.storage()->is_pinned() == pinned)
        return true;
    memory_ = {};
    const MemoryStatistics host = memory_statistics();
    std::string why =
        host.cap > 0 && bytes > host.cap - host.peak
            ? fmt::format("with the {} bytes that were in use at the peak it would pass the cap of {}.",
                          host.peak, host.cap)
            : "";
    if (why.empty()) {
        try {
            memory_ = Tensor::empty({bytes}, {DType::u8, Device::cpu(), pinned});
            return true;
        } catch (const OutOfMemory& error) {
            why = error.what();
        }
    }
    if (!std::exchange(said_no_memory_, true))
        warn(
            fmt::format("there is no memory for a copy of the state ({} bytes), so training waits while a "
                        "checkpoint is written: {}",
                        bytes, why));
    return false;
}

void CheckpointWriter::warn(const std::string& sentence) const {
    if (warn_)
        warn_(sentence);
    else
        fmt::print(stderr, "[checkpoint_writer] warning: {}\n", sentence);
}

}  // namespace potluck
