#include "core/cpu/parallel.h"

#include "core/error.h"
#include "core/op_scope.h"

namespace potluck::cpu {
namespace {

thread_local int threads_of_kernel = 0;  // 0: no kernel runs on this thread

}  // namespace

Team::Team(int threads) : before_(threads_of_kernel) { threads_of_kernel = threads; }
Team::~Team() { threads_of_kernel = before_; }

int team_size() {
    if (omp_in_parallel() != 0) return 1;
    if (threads_of_kernel == 0)
        throw Error(OpScope::current(),
                    "a kernel of the CPU works in parallel and names no team. Call it by way of "
                    "its device, which sets one.");
    return threads_of_kernel;
}

}  // namespace potluck::cpu
