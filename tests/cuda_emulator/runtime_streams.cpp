// The CUDA runtime: streams and events. Operations have been executed when the call that starts them returns; waiting
// only joins clocks (see streams.h).

#include <fmt/format.h>

#include <utility>

#include "tests/cuda_emulator/graph.h"
#include "tests/cuda_emulator/runtime.h"

using namespace potluck::emulator;

namespace {

CUevent_st* find_event(cudaEvent_t handle) { return state().events.count(handle) != 0 ? handle : nullptr; }

/// For calls that wait for a stream or query it.
cudaError_t wait_for(cudaStream_t handle) {
    CUstream_st* stream = find_stream(handle);
    if (stream == nullptr) return finish(cudaErrorInvalidResourceHandle);
    if (const cudaError_t status = device(stream->device).sticky; status != cudaSuccess)
        return finish(status);
    if (stream->capture != nullptr) {
        stream->capture->is_valid = false;
        return finish(cudaErrorStreamCaptureUnsupported);
    }
    Clock clock = stream->clock;
    if (stream->is_legacy)
        for (const CUstream_st* other : state().streams)
            if (other->device == stream->device && other->waits_for_legacy) join(clock, other->clock);
    host_waits(clock, stream->device);
    return cudaSuccess;
}

cudaError_t wait_for(CUevent_st* event) {
    if (event == nullptr) return finish(cudaErrorInvalidResourceHandle);
    if (const cudaError_t status = device(event->device).sticky; status != cudaSuccess) return finish(status);
    if (event->capture != nullptr) {
        invalidate_captures();
        return finish(cudaErrorCapturedEvent);
    }
    if (event->recorded) host_waits(event->clock, event->device);
    return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    const std::lock_guard lock(state().mutex);
    if (stream == nullptr || (flags != cudaStreamDefault && flags != cudaStreamNonBlocking))
        return finish(cudaErrorInvalidValue);
    if (const cudaError_t status = device_error(); status != cudaSuccess) return finish(status);
    auto* made = new CUstream_st;
    made->device = current_device();
    made->slot = new_slot();
    made->waits_for_legacy = flags == cudaStreamDefault;
    made->number = take_stream_number();
    state().streams.insert(made);
    *stream = made;
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
    return cudaStreamCreateWithFlags(stream, flags);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    const std::lock_guard lock(state().mutex);
    if (state().streams.erase(stream) == 0) return finish(cudaErrorInvalidResourceHandle);
    if (stream->capture != nullptr) invalidate_captures();
    // A wait for the whole device includes this stream's work.
    join(device(stream->device).legacy_stream.clock, stream->clock);
    free_slot(stream->slot);
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    const std::lock_guard lock(state().mutex);
    ++state().host_waits;
    return wait_for(stream);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    const std::lock_guard lock(state().mutex);
    return wait_for(stream);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t event_handle, unsigned flags) {
    const std::lock_guard lock(state().mutex);
    CUstream_st* stream = find_stream(stream_handle);
    CUevent_st* event = find_event(event_handle);
    if (stream == nullptr || event == nullptr) return finish(cudaErrorInvalidResourceHandle);
    if (flags != cudaEventWaitDefault && flags != cudaEventWaitExternal) return finish(cudaErrorInvalidValue);
    if (event->capture != nullptr) return finish(wait_captured(*stream, *event));
    if (stream->capture != nullptr) {
        // Work outside the capture cannot become part of it.
        if (!event->recorded) return cudaSuccess;
        stream->capture->is_valid = false;
        return finish(cudaErrorStreamCaptureIsolation);
    }
    if (event->recorded) join(stream->clock, event->clock);
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
    const std::lock_guard lock(state().mutex);
    CUstream_st* stream = find_stream(handle);
    if (stream == nullptr) return finish(cudaErrorInvalidResourceHandle);
    if (status == nullptr) return finish(cudaErrorInvalidValue);
    *status = stream->capture == nullptr  ? cudaStreamCaptureStatusNone
              : stream->capture->is_valid ? cudaStreamCaptureStatusActive
                                          : cudaStreamCaptureStatusInvalidated;
    return cudaSuccess;
}

cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* index) {
    const std::lock_guard lock(state().mutex);
    CUstream_st* stream = find_stream(handle);
    if (stream == nullptr) return finish(cudaErrorInvalidResourceHandle);
    if (index == nullptr) return finish(cudaErrorInvalidValue);
    *index = stream->device;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    const std::lock_guard lock(state().mutex);
    constexpr unsigned known = cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess;
    if (event == nullptr || (flags & ~known) != 0) return finish(cudaErrorInvalidValue);
    if (const cudaError_t status = device_error(); status != cudaSuccess) return finish(status);
    auto* made = new CUevent_st;
    made->device = current_device();
    made->has_timing = (flags & cudaEventDisableTiming) == 0;
    state().events.insert(made);
    *event = made;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    const std::lock_guard lock(state().mutex);
    if (state().events.erase(event) == 0) return finish(cudaErrorInvalidResourceHandle);
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event_handle, cudaStream_t stream_handle) {
    const std::lock_guard lock(state().mutex);
    CUstream_st* stream = find_stream(stream_handle);
    CUevent_st* event = find_event(event_handle);
    // The documentation requires event and stream to belong to the same device.
    if (stream == nullptr || event == nullptr || stream->device != event->device)
        return finish(cudaErrorInvalidResourceHandle);
    if (const cudaError_t status = device(stream->device).sticky; status != cudaSuccess)
        return finish(status);
    if (stream->capture != nullptr) {
        record_event(*event, *stream);
        return cudaSuccess;
    }
    event->capture = nullptr;
    event->recorded = true;
    event->was_queried = false;
    event->clock = stream->clock;
    join(event->clock, state().host_clock);
    event->time = std::chrono::steady_clock::now();
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    const std::lock_guard lock(state().mutex);
    ++state().host_waits;
    return wait_for(find_event(event));
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
    const std::lock_guard lock(state().mutex);
    CUevent_st* event = find_event(handle);
    if (state().answers_late && event != nullptr && event->recorded &&
        !std::exchange(event->was_queried, true)) {
        Clock known = state().host_clock;
        join(known, event->clock);
        if (known != state().host_clock) return cudaErrorNotReady;
    }
    return wait_for(event);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start_handle, cudaEvent_t end_handle) {
    const std::lock_guard lock(state().mutex);
    const CUevent_st* start = find_event(start_handle);
    const CUevent_st* end = find_event(end_handle);
    if (milliseconds == nullptr) return finish(cudaErrorInvalidValue);
    if (start == nullptr || end == nullptr || !start->has_timing || !end->has_timing || !start->recorded ||
        !end->recorded)
        return finish(cudaErrorInvalidResourceHandle);
    *milliseconds = std::chrono::duration<float, std::milli>(end->time - start->time).count();
    return cudaSuccess;
}
}
