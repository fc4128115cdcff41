// Functions of a warp: the results of its lanes when all of them have arrived.

#include <fmt/format.h>

#include "tests/cuda_emulator/block.h"
#include "tests/cuda_emulator/state.h"

namespace potluck::emulator {
namespace {

template <class Visit>
void for_each_lane(unsigned mask, Visit visit) {
    for (; mask != 0; mask &= mask - 1) visit(static_cast<unsigned>(std::countr_zero(mask)));
}

struct ShuffleLane {
    std::uint64_t bits;
    unsigned operand;
    int width;
    std::uint64_t result;
};

/// PTX ISA, "shfl.sync": a lane outside its segment of `width` lanes keeps its own value.
template <Shuffle Kind>
unsigned source_lane(unsigned lane, unsigned operand, unsigned width) {
    const unsigned begin = lane & ~(width - 1);
    if constexpr (Kind == Shuffle::index) return begin | (operand & (width - 1));
    if constexpr (Kind == Shuffle::up) return lane - begin < operand ? lane : lane - operand;
    if constexpr (Kind == Shuffle::down) return lane - begin + operand >= width ? lane : lane + operand;
    const unsigned source = lane ^ operand;
    return source >= begin + width ? lane : source;
}

template <Shuffle Kind>
void complete_shuffle(PendingMeeting& meeting) {
    for_each_lane(meeting.mask, [&](unsigned lane) {
        auto& own = *static_cast<ShuffleLane*>(meeting.payload[lane]);
        const unsigned source = source_lane<Kind>(lane, own.operand, static_cast<unsigned>(own.width));
        if ((meeting.mask >> (source & 31u) & 1u) == 0)
            stop(
                FaultKind::warp,
                fmt::format(
                    "{} with mask {:#010x} in {}: lane {} asks for the value of lane {}, which the mask does "
                    "not name",
                    name_of(meeting.kind), meeting.mask, describe_running(), lane, source));
        own.result = static_cast<ShuffleLane*>(meeting.payload[source])->bits;
    });
}

struct VoteLane {
    bool predicate;
    unsigned result;
};
void complete_ballot(PendingMeeting& meeting) {
    unsigned votes = 0;
    for_each_lane(meeting.mask, [&](unsigned lane) {
        if (static_cast<VoteLane*>(meeting.payload[lane])->predicate) votes |= 1u << lane;
    });
    for_each_lane(meeting.mask,
                  [&](unsigned lane) { static_cast<VoteLane*>(meeting.payload[lane])->result = votes; });
}

struct FoldLane {
    Fold kind;
    unsigned value;
    bool is_signed;
    unsigned result;
};
unsigned folded(Fold kind, bool is_signed, unsigned a, unsigned b) {
    const bool less = is_signed ? static_cast<int>(a) < static_cast<int>(b) : a < b;
    switch (kind) {
        case Fold::add:
            return a + b;
        case Fold::minimum:
            return less ? a : b;
        case Fold::maximum:
            return less ? b : a;
        case Fold::bit_and:
            return a & b;
        case Fold::bit_or:
            return a | b;
        case Fold::bit_xor:
            return a ^ b;
    }
    return 0;
}
void complete_fold(PendingMeeting& meeting) {
    const auto first = static_cast<unsigned>(std::countr_zero(meeting.mask));
    const FoldLane& begin = *static_cast<FoldLane*>(meeting.payload[first]);
    unsigned result = begin.value;
    for_each_lane(meeting.mask & (meeting.mask - 1), [&](unsigned lane) {
        result =
            folded(begin.kind, begin.is_signed, result, static_cast<FoldLane*>(meeting.payload[lane])->value);
    });
    for_each_lane(meeting.mask,
                  [&](unsigned lane) { static_cast<FoldLane*>(meeting.payload[lane])->result = result; });
}

struct MatchLane {
    std::uint64_t bits;
    unsigned result;
};
void complete_match(PendingMeeting& meeting) {
    for_each_lane(meeting.mask, [&](unsigned lane) {
        auto& own = *static_cast<MatchLane*>(meeting.payload[lane]);
        own.result = 0;
        for_each_lane(meeting.mask, [&](unsigned other) {
            if (static_cast<MatchLane*>(meeting.payload[other])->bits == own.bits) own.result |= 1u << other;
        });
    });
}

void complete_synchronization(PendingMeeting&) { ++active.worker->warps[active.worker->thread / lanes].time; }

}  // namespace

const char* name_of(Meeting meeting) {
    switch (meeting) {
        case Meeting::shuffle_index:
            return "__shfl_sync";
        case Meeting::shuffle_up:
            return "__shfl_up_sync";
        case Meeting::shuffle_down:
            return "__shfl_down_sync";
        case Meeting::shuffle_xor:
            return "__shfl_xor_sync";
        case Meeting::ballot:
            return "a vote (__ballot_sync, __any_sync, __all_sync)";
        case Meeting::fold:
            return "__reduce_sync";
        case Meeting::match:
            return "__match_any_sync";
        case Meeting::synchronize:
            return "__syncwarp";
        case Meeting::multiply:
            return "mma_m16n8k16";
        case Meeting::load_matrix:
            return "ldmatrix";
    }
    return "?";
}

std::uint64_t shuffle(Shuffle kind, unsigned mask, std::uint64_t bits, unsigned operand, int width) {
    const Muted muted;
    if (width < 1 || width > 32 || (width & (width - 1)) != 0)
        stop(FaultKind::warp, fmt::format("a shuffle of width {} in {}: it must be a power of two up to 32",
                                          width, describe_running()));
    ShuffleLane lane{bits, operand, width, 0};
    Worker& worker = *active.worker;
    switch (kind) {
        case Shuffle::index:
            worker.meet(Meeting::shuffle_index, mask, &lane, complete_shuffle<Shuffle::index>);
            break;
        case Shuffle::up:
            worker.meet(Meeting::shuffle_up, mask, &lane, complete_shuffle<Shuffle::up>);
            break;
        case Shuffle::down:
            worker.meet(Meeting::shuffle_down, mask, &lane, complete_shuffle<Shuffle::down>);
            break;
        case Shuffle::exclusive_or:
            worker.meet(Meeting::shuffle_xor, mask, &lane, complete_shuffle<Shuffle::exclusive_or>);
            break;
    }
    return lane.result;
}

unsigned ballot(unsigned mask, bool predicate) {
    const Muted muted;
    VoteLane lane{predicate, 0};
    active.worker->meet(Meeting::ballot, mask, &lane, complete_ballot);
    return lane.result;
}

unsigned fold(Fold kind, unsigned mask, unsigned value, bool is_signed) {
    const Muted muted;
    FoldLane lane{kind, value, is_signed, 0};
    active.worker->meet(Meeting::fold, mask, &lane, complete_fold);
    return lane.result;
}

unsigned match(unsigned mask, std::uint64_t bits) {
    const Muted muted;
    MatchLane lane{bits, 0};
    active.worker->meet(Meeting::match, mask, &lane, complete_match);
    return lane.result;
}

void synchronize_warp(unsigned mask) {
    const Muted muted;
    active.worker->meet(Meeting::synchronize, mask, nullptr, complete_synchronization);
}

unsigned active_lanes() { return ~active.worker->warps[active.worker->thread / lanes].absent; }

}  // namespace potluck::emulator
