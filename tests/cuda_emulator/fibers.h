#pragma once

// Internal: fibers, on which the threads of a block run. A switch takes a few nanoseconds, and a fiber that waits for
// good may simply be left: nothing on its stack needs a destructor.

#include <boost/context/detail/fcontext.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace potluck::emulator {

struct OfThisThread {};

struct Fiber {
    Fiber() = default;
    /// Where this host thread itself runs.
    explicit Fiber(OfThisThread);

    boost::context::detail::fcontext_t context = nullptr;
    char* stack = nullptr;  // its lowest byte, above a page that may not be touched
    std::size_t stack_bytes = 0;
    void* fake_stack = nullptr;  // of the address sanitizer
};

/// The fibers of one host thread.
class FiberPool {
public:
    using Entry = void (*)(boost::context::detail::transfer_t);
    explicit FiberPool(Entry entry) : entry_(entry) {}
    FiberPool(const FiberPool&) = delete;
    FiberPool& operator=(const FiberPool&) = delete;
    ~FiberPool();

    /// An idle fiber, or a new one.
    Fiber& take();
    /// The fiber has nothing to do, and goes on where it stopped when it is taken again.
    void put_idle(Fiber& fiber) { idle_.push_back(&fiber); }
    /// Leaves all fibers where they are; they begin anew when they are taken again.
    void abandon_all();

private:
    void prepare(Fiber& fiber);

    Entry entry_;
    std::vector<std::unique_ptr<Fiber>> fibers_;
    std::vector<Fiber*> idle_;
};

/// Where the stacks of all fibers lie.
struct Stacks {
    std::uintptr_t begin = 0;
    std::uintptr_t bytes = 0;
};
extern Stacks stacks;

/// Goes to `to`; returns when somebody comes back to `from`.
void switch_fiber(Fiber& from, Fiber& to);
/// What a fiber's entry does first with its argument.
void arrived(boost::context::detail::transfer_t transfer, Fiber& self);

}  // namespace potluck::emulator
