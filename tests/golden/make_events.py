"""Makes events.tfevents, an event file by TensorBoard's own code, for nn/train/event_file.cpp to agree with, byte for byte.

    pip install tensorboard; python3 tests/golden/make_events.py
"""

import pathlib

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


def scalars(wall_time, step, values):
    summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values])
    return Event(wall_time=wall_time, step=step, summary=summary)


long_name = "a name of more than 127 bytes, so that its length takes two: " + 80 * "."
start = 1764588000
events = [
    Event(wall_time=start + 0.25, file_version="brain.Event:2"),
    Event(wall_time=start + 0.25, step=1, session_log=SessionLog(status=SessionLog.START)),
    scalars(start + 0.5, 1, [("loss/train", 2.5), ("throughput/mfu", 0.25)]),
    scalars(start + 1.75, 300, [("loss/train", -1e-8), ("loss/validation", 1e30), ("time/data", 0.0)]),
    scalars(start + 2, 1 << 40, [(long_name, 1)]),
]
with open(pathlib.Path(__file__).parent / "events.tfevents", "wb") as file:
    writer = RecordWriter(file)
    for event in events:
        writer.write(event.SerializeToString(deterministic=True))
