#include "tests/cuda_emulator/kernel_races.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "tests/cuda_emulator/arena.h"
#include "tests/cuda_emulator/block.h"
#include "tests/cuda_emulator/state.h"

namespace potluck::emulator {
namespace {

// Other host threads run other blocks concurrently.
KernelAccess load(const std::uint64_t& record) {
    return std::bit_cast<KernelAccess>(__atomic_load_n(&record, __ATOMIC_RELAXED));
}
void store(std::uint64_t& record, KernelAccess access) {
    __atomic_store_n(&record, std::bit_cast<std::uint64_t>(access), __ATOMIC_RELAXED);
}

[[noreturn]] void report_race(std::uint64_t granule, bool write, KernelAccess other, bool other_writes) {
    const Muted muted;
    const Worker& worker = *active.worker;
    const bool same_block = other.block == (worker.block_index & 0xfffu) && other.crowd != 2;
    stop(FaultKind::kernel_race,
         fmt::format("race in device memory: {} {} {}, which {} {}{}", describe_running(),
                     write ? "writes" : "reads", describe(arena.begin + 4 * granule),
                     same_block ? worker.describe_thread(other.thread) + " of the same block"
                                : "a thread of another block",
                     other_writes ? "writes" : "reads",
                     same_block ? " with no barrier between" : ", and nothing orders blocks"));
}

}  // namespace

void check_kernel_race(std::uint64_t offset, std::uint64_t bytes, bool write) {
    const Worker& worker = *active.worker;
    if (worker.has_fences()) return;
    KernelAccess now = worker.access;
    const std::uint64_t end = offset + bytes;
    while (offset < end) {
        const std::uint64_t granule = offset / 4;
        const std::uint64_t next = std::min(4 * (granule + 1), end);
        const auto touched = static_cast<unsigned>(((1u << (next - offset)) - 1u) << offset % 4);
        now.bytes = touched & 0xfu;
        offset = next;

        const auto is_race = [&](KernelAccess other) {
            if (other.operation != now.operation || (other.bytes & touched) == 0) return false;
            if (other.crowd == 2 || other.block != now.block) return true;
            return other.time == now.time && (other.crowd == 1 || other.thread / lanes != now.thread / lanes);
        };
        Arena::KernelRecord& record = arena.kernel_records[granule];
        const KernelAccess writer = load(record.write);
        if (is_race(writer)) report_race(granule, write, writer, true);
        const KernelAccess reader = load(record.read);
        if (write) {
            if (is_race(reader)) report_race(granule, write, reader, false);
            store(record.write, now);
            continue;
        }
        KernelAccess after = now;
        if (reader.operation == now.operation && (reader.bytes & touched) != 0) {
            if (reader.crowd == 2) continue;
            const bool same_block = reader.block == now.block;
            if (!same_block) {
                after.crowd = 2;
                after.bytes = reader.bytes & touched & 0xfu;
            } else if (reader.time == now.time) {
                if (reader.crowd == 1) continue;
                if (reader.thread / lanes != now.thread / lanes) {
                    after.crowd = 1;
                    after.bytes = reader.bytes & touched & 0xfu;
                }
            }
        }
        store(record.read, after);
    }
}

}  // namespace potluck::emulator
