"""What a run tells people: report.html, opened in a headless browser, and its curves, read by TensorBoard itself.

    report.py BUILD_FOLDER

The browser is Debian's chromium-headless-shell, or another Chromium. TensorBoard is the package of PyPI, in this Python or in
the one that POTLUCK_TENSORBOARD_PYTHON names. Where one of them is missing, its checks are skipped.
"""

import html
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile

from checks import Skip, case, require, root, run, shell, succeed

train_gpt = pathlib.Path(sys.argv[1]).resolve() / "examples" / "train_gpt"
temporary = tempfile.TemporaryDirectory(prefix="potluck_report_")
folder = pathlib.Path(temporary.name)
(folder / "text.txt").write_text("".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(200)))
options = ["--layers", 1, "--heads", 2, "--width", 32, "--context", 16, "--batch", 4, "--warmup", 2, "--sample-tokens", 0]


def trained(name, *arguments):
    """A run with a name that HTML would misread, and its folder."""
    if not (folder / name).exists():
        succeed([train_gpt, "--text", folder / "text.txt", "--run-folder", name, *options, *arguments], cwd=folder)
    return folder / name


def whole_run():
    return trained("a <b>bold</b> run", "--steps", 30, "--validate-every", 10, "--checkpoint-every", 10)


# ---- in a browser ----

# Runs in the page: what is shown, where, and what went wrong.
probe = """<script>
const place = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.width, r.height]; };
const all = (selector, of) => [...document.querySelectorAll(selector)].map(of);
const found = {
    text: document.body.innerText,
    wide: document.documentElement.scrollWidth > document.documentElement.clientWidth,
    resources: performance.getEntriesByType("resource").length,
    charts: all("svg", e => ({name: e.getAttribute("aria-label"), place: place(e),
                              lines: [...e.querySelectorAll("polyline")].map(place),
                              dots: e.querySelectorAll("circle").length})),
    bars: all("td.bar div", e => place(e)[2]),
    bold: all("b", e => e.innerText),
    colors: [getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor],
};
document.body.innerHTML = "";
document.body.append(Object.assign(document.createElement("pre"), {id: "found", innerText: JSON.stringify(found)}));
</script>"""


def find_browser():
    for name in ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"):
        if shutil.which(name):
            return [name, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder / 'browser'}"]
    raise Skip("there is no Chromium here (Debian's package chromium-headless-shell)")


def shown(page, width, *browser_options):
    """What a browser with a window of this width shows of a page."""
    browser = find_browser()
    probed = folder / "probed.html"
    probed.write_text(page.read_text().replace("</body>", probe + "</body>"))
    output = succeed([*browser, *browser_options, f"--window-size={width},900", "--dump-dom", probed.as_uri()])
    found = re.search(r'<pre id="found">(.*?)</pre>', output, re.DOTALL)
    require(found, f"the page did not come up:\n{output[-2000:]}")
    return json.loads(html.unescape(found[1]))


@case("report: a browser shows curves, shares, memory and settings of a run, and loads nothing else")
def in_a_browser():
    find_browser()
    run_folder = whole_run()
    summary = json.loads((run_folder / "summary.json").read_text())
    page = shown(run_folder / "report.html", 1200)
    require(page["resources"] == 0, "the page loads something")
    require("a <b>bold</b> run" in page["text"], f"the name of the run is not shown as it is:\n{page['text'][:200]}")
    require("bold" not in page["bold"], "text became HTML")
    for words in ("finished", "30\nsteps", "samples/s", "tokens/s", "MFU", "peak memory", "The limit is ",
                  "Where the time goes", "waiting for data", "forward", "backward", "optimizer", "saving", "parameters",
                  "optimizer state", "activations", "--learning-rate", summary["mfu_formula"]):
        require(words in page["text"], f"{words!r} is missing:\n{page['text']}")
    require(f"{summary['final_train_loss']:.4f}\ntraining loss" in page["text"], "the last loss")
    charts = {chart["name"]: chart for chart in page["charts"]}
    require(set(charts) == {"loss", "norm of the gradient", "learning rate", "tokens/s", "MFU", "shares of time"}, charts.keys())
    for name, chart in charts.items():
        left, top, width, height = chart["place"]
        require(width > 300 and height > 100, f"{name} is {width} x {height}")
        for x, y, w, h in chart["lines"]:
            require(left <= x and x + w <= left + width and top <= y and y + h <= top + height, f"{name}: a line leaves its chart")
    require(len(charts["loss"]["lines"]) == 2 and charts["loss"]["dots"] == 3, f"loss and validation: {charts['loss']}")
    for name in ("norm of the gradient", "learning rate", "tokens/s", "MFU"):
        require(len(charts[name]["lines"]) == 1, f"{name}: {charts[name]}")
    loss = charts["loss"]["lines"][0]
    require(loss[2] > 0.7 * charts["loss"]["place"][2] and loss[3] > 0.3 * charts["loss"]["place"][3], f"the loss is a speck: {loss}")
    require(len(page["bars"]) > 14 and max(page["bars"]) > 20, f"bars: {page['bars']}")


@case("report: it fits a telephone, and has a dark face")
def narrow_and_dark():
    find_browser()
    page = whole_run() / "report.html"
    require(not shown(page, 400)["wide"], "it is wider than a window of 400 pixels")
    light = shown(page, 1200)["colors"]
    dark = shown(page, 1200, "--blink-settings=preferredColorScheme=0")["colors"]
    require(light != dark, f"light and dark are both {light}")


@case("report: a screenshot is not blank")
def screenshot():
    browser = find_browser()
    picture = folder / "report.png"
    succeed([*browser, "--window-size=1200,2400", f"--screenshot={picture}", (whole_run() / "report.html").as_uri()])
    require(picture.stat().st_size > 40_000, f"a screenshot of {picture.stat().st_size} bytes is blank")


# ---- in TensorBoard ----

read_events = """
import json, sys
from tensorboard.backend.event_processing import event_accumulator, event_file_loader
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
if sys.argv[1] == "file":
    loaded = event_file_loader.EventFileLoader(sys.argv[2]).Load()
    print(json.dumps([[e.step, [v.tag for v in e.summary.value]] for e in loaded]))
else:
    events = event_accumulator.EventAccumulator(sys.argv[2], size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    from tensorboard.util import tensor_util
    read = lambda tag: [[e.step, float(tensor_util.make_ndarray(e.tensor_proto))] for e in events.Tensors(tag)]
    tags = events.Tags()
    print(json.dumps({tag: read(tag) for tag in tags["tensors"]} |
                     {tag: [[e.step, e.value] for e in events.Scalars(tag)] for tag in tags["scalars"]}))
"""


def tensorboard(what, path):
    python = os.environ.get("POTLUCK_TENSORBOARD_PYTHON", sys.executable)
    if shell([python, "-c", "import tensorboard"]).returncode != 0:
        raise Skip("the Python package tensorboard is not installed (POTLUCK_TENSORBOARD_PYTHON may name a Python that has it)")
    output = succeed([python, "-W", "ignore", "-c", read_events, what, path])
    return json.loads(output.splitlines()[-1])


@case("tensorboard: reads the golden file that our writer is held to")
def golden_events():
    events = tensorboard("file", root / "tests" / "golden" / "events.tfevents")
    require([step for step, _ in events] == [0, 1, 1, 300, 1 << 40], events)
    require(events[3][1] == ["loss/train", "loss/validation", "time/data"], events)


def check_curves(run_folder):
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    curves = tensorboard("folder", run_folder / "tensorboard")
    require({"loss/train", "loss/validation", "throughput/tokens_per_second", "throughput/samples_per_second",
             "throughput/mfu", "memory/peak_bytes", "optimizer/learning_rate", "time/data"} <= set(curves), curves.keys())
    steps = [line["step"] for line in lines]
    for tag, values in curves.items():
        if tag != "loss/validation":
            require([step for step, _ in values] == steps, f"{tag}: {[step for step, _ in values]}")
    for (_, value), line in zip(curves["loss/train"], lines):
        require(abs(value - line["loss"]) < 1e-6 * abs(line["loss"]), f"{value} is not {line['loss']}")
    for i in range(len(lines)):
        whole = sum(values[i][1] for tag, values in curves.items() if tag.startswith("time/"))
        require(abs(whole - 1) < 1e-5, f"the shares of step {i + 1} add up to {whole}")
    return curves


@case("tensorboard: reads every number of a run")
def run_in_tensorboard():
    curves = check_curves(whole_run())
    require([step for step, _ in curves["loss/validation"]] == [10, 20, 30], curves["loss/validation"])


@case("tensorboard: no step shows twice after a run was killed beyond its last checkpoint and resumed")
def resumed_in_tensorboard():
    run_folder = trained("killed", "--steps", 20, "--checkpoint-every", 12)
    # As if it had been killed behind step 20: the last checkpoint is that of step 12, and an event is half written.
    shutil.rmtree(run_folder / "checkpoints" / "step_00000020")
    events = next((run_folder / "tensorboard").iterdir())
    events.write_bytes(events.read_bytes() + events.read_bytes()[:50])
    succeed([train_gpt, "--resume", "killed", "--sample-tokens", 0], cwd=folder)
    require(len(list((run_folder / "tensorboard").iterdir())) == 2, "each process writes a file of its own")
    check_curves(run_folder)


run()
