#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <string>

#include "core/tensor.h"
#include "nn/train/checkpoint.h"

namespace potluck {

/// Saves checkpoints while the training goes on. save() copies everything that save_checkpoint() would write into memory of
/// the host, and returns; a thread of its own writes the copy. What is changed after save() has returned does not reach the
/// files, which are those of save_checkpoint(), byte for byte.
///
/// It takes as many bytes of the host as a checkpoint has, from the first save() to its own end: in memory_statistics() they
/// stand under "checkpoint_writer". Beside a GPU the memory is pinned. The GPU copies in its copy stream and its compute
/// stream waits for the end of that; the host waits for neither. Where the memory cannot be had (or a cap is set which it
/// would pass together with the peak so far), save() writes before it returns, and says so once.
///
/// At most one checkpoint is being written at a time. One that fails (disk full) is told by the Error that the next call of
/// save(), poll() or wait() throws; nothing is left of it, and all checkpoints before it stay. One that was cut off with the
/// program is never complete, so whoever resumes takes the one before.
///
/// All calls come from the thread that trains, and nobody else writes checkpoints to the folder meanwhile.
class CheckpointWriter {
public:
    using Warn = std::function<void(const std::string& sentence)>;

    /// Of the complete checkpoints in `folder` the newest `keep` stay (0: all). `warn`: what is said goes there; none: to
    /// standard error.
    explicit CheckpointWriter(std::string folder, std::int64_t keep = 0, Warn warn = {});
    /// Waits for what is being written. When that fails there is nobody left to tell, so it is a warning.
    ~CheckpointWriter();
    CheckpointWriter(const CheckpointWriter&) = delete;
    CheckpointWriter& operator=(const CheckpointWriter&) = delete;

    /// Waits for the checkpoint before, then starts this one: see save_checkpoint().
    void save(const nn::Module& module, const optim::Optimizer& optimizer, const TrainingState& state);
    /// The same, but returns when it is complete, and takes no memory. Returns the path.
    std::string save_and_wait(const nn::Module& module, const optim::Optimizer& optimizer,
                              const TrainingState& state);

    /// Whether a checkpoint is being written. Does not wait.
    bool is_writing() const;
    /// Throws the Error of a checkpoint that has failed. Does not wait.
    void poll();
    /// Waits for what is being written. Returns the path of the newest checkpoint that this writer has completed; empty
    /// when there is none.
    std::string wait();

private:
    bool take_memory(const CheckpointContent& content);
    void warn(const std::string& sentence) const;

    std::string folder_;
    std::int64_t keep_;
    Warn warn_;
    Tensor memory_;  // u8; what a checkpoint is copied to
    bool said_no_memory_ = false;
    std::string complete_;
    std::future<std::string> writing_;  // valid: one was started and not waited for
};

}  // namespace potluck
