#include "core/checksum.h"

#include <fcntl.h>
#include <unistd.h>
#include <xxhash.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <vector>

#include "core/format.h"

namespace potluck {

struct Checksum::State {
    State() : xxh3(XXH3_createState()) {
        if (xxh3 == nullptr) throw std::bad_alloc();
        XXH3_64bits_reset(xxh3);
    }
    ~State() { XXH3_freeState(xxh3); }
    State(const State&) = delete;
    State& operator=(const State&) = delete;

    XXH3_state_t* xxh3;
};

Checksum::Checksum() : state_(std::make_unique<State>()) {}

Checksum::~Checksum() = default;

void Checksum::add(const void* data, std::int64_t bytes) {
    if (bytes > 0) XXH3_64bits_update(state_->xxh3, data, static_cast<std::size_t>(bytes));
}

std::string Checksum::text() const {
    return fmt::format("{:016x}", static_cast<std::uint64_t>(XXH3_64bits_digest(state_->xxh3)));
}

std::string checksum_of_file(const std::string& op, const std::string& path) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    const auto failed = [&] {
        return Error(op, fmt::format("{} cannot be read: {}.", path, std::strerror(errno)));
    };
    if (file < 0) throw failed();
    const std::unique_ptr<const int, void (*)(const int*)> closing(&file,
                                                                   [](const int* open) { close(*open); });
    Checksum checksum;
    std::vector<std::byte> piece(std::size_t{1} << 20);
    for (;;) {
        const ssize_t bytes = read(file, piece.data(), piece.size());
        if (bytes < 0 && errno == EINTR) continue;
        if (bytes < 0) throw failed();
        if (bytes == 0) return checksum.text();
        checksum.add(piece.data(), bytes);
    }
}

}  // namespace potluck
