#pragma once

// Internal: fibers, which run the threads of a block. A switch takes a few nanoseconds, and a fiber that will never
// continue can simply be abandoned: nothing on its stack needs a destructor.

#include <boost/context/detail/fcontext.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace potluck::emulator {

struct OfThisThread {};

struct Fiber {
    Fiber() = default;
    /// The fiber of the host thread itself.
    explicit Fiber(OfThisThread);

    boost::context::detail::fcontext_t context = nullptr;
    char* stack = nullptr;  // its lowest byte, above a guard page
    std::size_t stack_bytes = 0;
    void* fake_stack = nullptr;  // for the address sanitizer
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
    /// Declares the fiber idle; it continues where it stopped when it is taken again.
    void put_idle(Fiber& fiber) { idle_.push_back(&fiber); }
    /// Abandons all fibers; they start again when they are taken.
    void abandon_all();

private:
    void prepare(Fiber& fiber);

    Entry entry_;
    std::vector<std::unique_ptr<Fiber>> fibers_;
    std::vector<Fiber*> idle_;
};

/// The address range of all fiber stacks.
struct Stacks {
    std::uintptr_t begin = 0;
    std::uintptr_t bytes = 0;
};
extern Stacks stacks;

/// Switches to `to`; returns when another fiber switches back to `from`.
void switch_fiber(Fiber& from, Fiber& to);
/// Must be called first by a fiber's entry function, with its argument.
void arrived(boost::context::detail::transfer_t transfer, Fiber& self);

}  // namespace potluck::emulator
