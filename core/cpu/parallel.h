#pragma once

#include <omp.h>

#include <cstdint>
#include <exception>

namespace potluck::cpu {

/// The threads that the running kernel may use: those of its device. CpuBackend sets one for every kernel that it calls;
/// it stands from the first to the last moment of the kernel, also of those that this one calls.
class Team {
public:
    explicit Team(int threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

private:
    int before_;
};

/// The number of threads of the current team. Throws Error outside of a kernel; 1 inside a parallel_for().
int team_size();

/// Calls body(first, last) for pieces [first, last) of [0, count) that are `piece` long (the last may be shorter), on
/// all threads of the team. The borders depend on count and piece only, so the result for a piece does not depend on
/// the number of threads. All pieces run, and the exception of the first piece that threw is rethrown in the caller:
/// the same one for any number of threads. Nested calls run serially.
template <class Body>
void parallel_for(std::int64_t count, std::int64_t piece, Body&& body) {
    const int team = team_size();
    const std::int64_t pieces = count <= 0 ? 0 : (count + piece - 1) / piece;
    if (pieces <= 1) {
        if (pieces == 1) body(std::int64_t{0}, count);
        return;
    }
    std::exception_ptr failure;
    std::int64_t failed_piece = pieces;
#pragma omp parallel for schedule(dynamic, 1) num_threads(team)
    for (std::int64_t i = 0; i < pieces; ++i) {
        try {
            const std::int64_t first = i * piece;
            body(first, first + piece < count ? first + piece : count);
        } catch (...) {
#pragma omp critical(potluck_parallel_for)
            if (i < failed_piece) {
                failed_piece = i;
                failure = std::current_exception();
            }
        }
    }
    if (failure) std::rethrow_exception(failure);
}

}  // namespace potluck::cpu
