// The streams of a device, and copies that run concurrently with the compute stream.

#include <algorithm>
#include <array>

#include "core/error.h"
#include "core/format.h"
#include "core/op_scope.h"
#include "cuda/cuda_backend.h"
#include "cuda/resources.h"

namespace potluck {

using cuda::check;

namespace {

class MarkedWork final : public PendingWork {
public:
    explicit MarkedWork(cudaStream_t queue) { end_.record(queue); }

    bool is_done() const noexcept override { return end_.is_done(); }
    void wait() const override { end_.synchronize(); }
    void block(Device device, StreamKind stream) const override {
        if (auto* const target = dynamic_cast<CudaBackend*>(&backend(device)))
            end_.block(target->stream(stream));
    }

private:
    cuda::Event end_;
};

class StreamMoment final : public Moment {
public:
    explicit StreamMoment(cudaStream_t queue) { event_.record(queue); }

    double seconds_since(const Moment& earlier) const override {
        const auto* start = dynamic_cast<const StreamMoment*>(&earlier);
        if (start == nullptr)
            throw Error(OpScope::current(), "the two moments are of different devices. Take both on one.");
        return 1e-3 * event_.elapsed_ms(start->event_);
    }

private:
    cuda::Event event_{/*timing=*/true};
};

std::byte* bytes_of(const Tensor& x) { return static_cast<std::byte*>(x.raw_data()); }

}  // namespace

cudaStream_t CudaBackend::stream(StreamKind kind) {
    check(cudaSetDevice(index_), "cudaSetDevice");
    switch (kind) {
        case StreamKind::communication:
            return resources().communication_stream.get();
        case StreamKind::copy:
            return resources().copy_stream.get();
        default:
            return resources().stream.get();
    }
}

void CudaBackend::follow_compute(cudaStream_t queue) {
    const cudaStream_t compute = stream(StreamKind::compute);
    if (queue == compute) return;
    const cuda::Event now;
    now.record(compute);
    now.block(queue);
}

std::shared_ptr<const PendingWork> CudaBackend::mark(cudaStream_t queue) {
    check(cudaSetDevice(index_), "cudaSetDevice");  // an event belongs to the current device
    return std::make_shared<MarkedWork>(queue);
}

std::unique_ptr<const Moment> CudaBackend::mark_moment() {
    return std::make_unique<StreamMoment>(stream(StreamKind::compute));
}

bool CudaBackend::reaches(CudaBackend& other) {
    if (&other == this) return true;
    Resources& own = resources();
    const std::lock_guard lock(own.reached_mutex);
    if (const auto known = own.reached.find(other.index_); known != own.reached.end()) return known->second;
    int can = 0;
    check(cudaDeviceCanAccessPeer(&can, index_, other.index_), "cudaDeviceCanAccessPeer");
    if (can != 0) {
        other.stream();  // opens it
        cudaMemAccessDesc access{};
        access.location.type = cudaMemLocationTypeDevice;
        access.location.id = index_;
        access.flags = cudaMemAccessFlagsProtReadWrite;
        check(cudaMemPoolSetAccess(other.resources().pool, &access, 1), "cudaMemPoolSetAccess");
    }
    return own.reached[other.index_] = can != 0;
}

std::shared_ptr<const PendingWork> CudaBackend::start_copy(const Tensor& from, Tensor& to, StreamKind kind) {
    stream();  // refuses if another device is recording
    const Tensor& far = from.device() == Device::cuda(index_) ? to : from;
    auto* const other = far.device().is_cpu() ? this : dynamic_cast<CudaBackend*>(&backend(far.device()));
    const bool by_staging = far.device().is_cpu() && !far.storage()->is_pinned();
    if (other == nullptr || is_capturing() || other->is_capturing())
        return Backend::start_copy(from, to, kind);
    if (by_staging) {  // it passes through the compute stream
        Backend::start_copy(from, to, kind);
        return mark(stream(StreamKind::compute));
    }
    if (!reaches(*other)) return copy_by_host(*other, from, to, kind);

    const cudaStream_t queue = stream(kind);
    follow_compute(queue);
    if (other != this) other->follow_compute(queue);
    const auto length = static_cast<std::size_t>(from.bytes());
    if (other == this)
        check(cudaMemcpyAsync(to.raw_data(), from.raw_data(), length, cudaMemcpyDefault, queue),
              "cudaMemcpyAsync");
    else
        check(cudaMemcpyPeerAsync(to.raw_data(), to.device().index, from.raw_data(), from.device().index,
                                  length, queue),
              "cudaMemcpyPeerAsync");
    return mark(queue);
}

std::shared_ptr<const PendingWork> CudaBackend::copy_by_host(CudaBackend& target, const Tensor& from,
                                                             Tensor& to, StreamKind kind) {
    // Two pieces alternate: one is filled here while the other is emptied there.
    struct Piece {
        Tensor host;
        std::shared_ptr<const PendingWork> emptied;
    };
    std::array<Piece, 2> pieces;
    const std::int64_t whole = from.bytes();
    const std::int64_t at_once = std::min(whole, static_cast<std::int64_t>(Resources::staging_bytes));
    const cudaStream_t source_queue = stream(kind);
    const cudaStream_t target_queue = target.stream(kind);
    follow_compute(source_queue);
    target.follow_compute(target_queue);
    std::size_t next = 0;
    for (std::int64_t done = 0; done < whole; done += at_once) {
        Piece& piece = pieces[next++ % pieces.size()];
        if (piece.emptied == nullptr)
            piece.host = Tensor::empty({at_once}, {DType::u8, Device::cpu(), /*pinned=*/true});
        else
            piece.emptied->block(from.device(), kind);
        const auto length = static_cast<std::size_t>(std::min(at_once, whole - done));
        check(cudaMemcpyAsync(bytes_of(piece.host), bytes_of(from) + done, length, cudaMemcpyDeviceToHost,
                              source_queue),
              "cudaMemcpyAsync");
        mark(source_queue)->block(to.device(), kind);
        check(cudaMemcpyAsync(bytes_of(to) + done, bytes_of(piece.host), length, cudaMemcpyHostToDevice,
                              target_queue),
              "cudaMemcpyAsync");
        piece.emptied = target.mark(target_queue);
        piece.host.storage()->keep_until(piece.emptied);
    }
    return target.mark(target_queue);
}

void CudaBackend::release_after(void* data, std::int64_t bytes, const PendingWorks& uses) noexcept try {
    const bool is_recorded = [&] {
        const std::lock_guard lock(recorded_mutex_);
        return recorded_blocks_.count(data) != 0;
    }();
    if (is_recorded || is_capturing()) return Backend::release_after(data, bytes, uses);
    // Freed in the copy stream: the block is reused only after all copies, and the compute stream waits for none.
    const cudaStream_t queue = stream(StreamKind::copy);
    for (const auto& use : uses) use->block(Device::cuda(index_), StreamKind::copy);
    follow_compute(queue);
    check(cudaFreeAsync(data, queue), "cudaFreeAsync");
} catch (...) {  // the driver may be gone: then there is nothing to free
}

void* CudaBackend::allocate_pinned(std::int64_t bytes) {
    check(cudaSetDevice(index_), "cudaSetDevice");
    void* data = nullptr;
    const cudaError_t status =
        cudaHostAlloc(&data, static_cast<std::size_t>(bytes), cudaHostAllocPortable);  // for all devices
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();  // reported by nullptr
        return nullptr;
    }
    check(status, "cudaHostAlloc");
    return data;
}

void CudaBackend::release_pinned(void* data, std::int64_t) noexcept { cudaFreeHost(data); }

}  // namespace potluck
