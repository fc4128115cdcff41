#include "core/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <utility>

#include "core/format.h"
#include "core/safetensors.h"

namespace potluck {
namespace {

std::string unused_name(const std::string& target) {
    static std::atomic<int> next{0};
    return fmt::format("{}.tmp-{}-{}", target, getpid(), next.fetch_add(1));
}

/// The file that a write to `path` reaches: the target of symbolic links, so that the link itself remains.
std::string behind_links(const std::string& path) {
    std::error_code failure;
    if (!std::filesystem::is_symlink(path, failure)) return path;
    const auto real = std::filesystem::weakly_canonical(path, failure);
    return failure ? path : real.string();
}

}  // namespace

AtomicFile::AtomicFile(std::string op, const std::string& path)
    : op_(std::move(op)), path_(path), target_(behind_links(path)) {
    if (path.empty()) throw Error(op_, "the path to write is empty.");
    if (path.find('\0') != std::string::npos)
        throw Error(op_, "the path to write holds a zero byte, where the system would cut it off.");
    folder_ = std::filesystem::path(target_).parent_path().string();
    if (folder_.empty()) folder_.push_back('.');
    struct stat existing {};
    if (stat(target_.c_str(), &existing) == 0 && !S_ISREG(existing.st_mode))
        throw Error(op_, fmt::format("{} exists and is no ordinary file. Choose another path.", path));
    file_ = open(folder_.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0666);
    if (file_ >= 0) return;
    // Not every file system supports files without a name.
    temporary_ = unused_name(target_);
    file_ = open(temporary_.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0666);
    if (file_ < 0) {
        temporary_.clear();
        fail("cannot be opened for writing");
    }
}

AtomicFile::~AtomicFile() {
    if (file_ >= 0) close(file_);
    if (!temporary_.empty()) unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, std::int64_t bytes) {
    const auto* next = static_cast<const char*>(data);
    while (bytes > 0) {
        // Small pieces: a piece is still in the CPU cache when its checksum is computed after the write.
        constexpr std::int64_t at_once = std::int64_t{1} << 19;
        const ssize_t written = ::write(file_, next, static_cast<std::size_t>(std::min(bytes, at_once)));
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) fail("cannot be written");
        checksum_.add(next, written);
        bytes_ += written;
        next += written;
        bytes -= written;
        // The disk works while the rest is copied, instead of waiting for fsync().
        constexpr std::int64_t stretch = std::int64_t{16} << 20;
        if (bytes_ - started_ >= stretch) {
            (void)sync_file_range(file_, started_, bytes_ - started_, SYNC_FILE_RANGE_WRITE);
            started_ = bytes_;
        }
    }
}

void AtomicFile::commit() {
    if (fsync(file_) != 0) fail("cannot be written to the disk");
    if (temporary_.empty()) give_name();
    if (rename(temporary_.c_str(), target_.c_str()) != 0) fail("cannot be replaced");
    temporary_.clear();
    const int folder = open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder >= 0) {
        fsync(folder);  // the content is safe; the name becomes durable later if fsync fails
        close(folder);
    }
}

void AtomicFile::give_name() {
    std::string name = unused_name(target_);
    const std::string self = fmt::format("/proc/self/fd/{}", file_);
    if (linkat(AT_FDCWD, self.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) != 0)
        fail("cannot be named");
    temporary_ = std::move(name);
}

void AtomicFile::fail(const char* what) const {
    const int reason = errno;
    const char* way_out = reason == ENOSPC || reason == EDQUOT || reason == EFBIG
                              ? " Free some space there, or choose another folder."
                          : reason == ENOENT                    ? " Create its folder first."
                          : reason == EACCES || reason == EROFS ? " Choose a folder that you may write to."
                                                                : "";
    throw Error(op_, fmt::format("{} {}: {}. What was there before is unchanged.{}", path_, what,
                                 std::strerror(reason), way_out));
}

void write_file_atomically(const std::string& path, std::string_view content) {
    AtomicFile file("write_file", path);
    file.write(content.data(), static_cast<std::int64_t>(content.size()));
    file.commit();
}

}  // namespace potluck
