"""The programs in examples/ run and print the right results. train_gpt is also stopped, resumed and given bad input.

    examples.py BUILD_FOLDER
"""

import gzip
import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from checks import case, require, root, run, shell, succeed

programs = pathlib.Path(sys.argv[1]).resolve() / "examples"
temporary = tempfile.TemporaryDirectory(prefix="potluck_examples_")
folder = pathlib.Path(temporary.name)
train_gpt = programs / "train_gpt"

text_file = folder / "text.txt"
text_file.write_text("".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(200)))
# A model that trains in a second.
small = ["--layers", 1, "--heads", 2, "--width", 32, "--context", 16, "--batch", 4, "--warmup", 2]


def number_after(text, output):
    found = re.search(re.escape(text) + r"\s*(-?[0-9.]+(?:e-?[0-9]+)?)", output)
    require(found, f"there is no number after {text!r} in:\n{output}")
    return float(found[1])


def wait_for(condition, seconds):
    """Waits for the condition; returns whether it became true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def close(a, b, tolerance):
    return abs(a - b) <= tolerance


def train(*arguments, **options):
    """Runs train_gpt in the temporary folder, where the runs go."""
    return shell([train_gpt, *arguments], cwd=folder, timeout=300, **options)


def trained(name, *arguments):
    """A new run in the folder `name`; its output."""
    result = train("--text", text_file, "--run-folder", name, *small, *arguments)
    require(result.returncode == 0, f"train_gpt ended with {result.returncode}:\n{result.stdout}")
    return result.stdout


def metrics_of(name):
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def checkpoint_of(name, step):
    return folder / name / "checkpoints" / f"step_{step:08}"


# ---- the path of small programs ----

@case("examples: 1_tensors shows views, broadcasting, types and errors")
def tensors():
    output = succeed([programs / "1_tensors"])
    for line in ("shape (2, 3), dtype f32, on cpu, 6 elements, 24 bytes", "column 2 of a: [3. 6.], stride 3",
                 "a turned has strides 1 and 3; contiguous: false", "[[11. 22. 30.]\n [14. 25. 30.]]",
                 "[[10. 20. 30.]\n [20. 40. 60.]]", "* 2 stays i64; * 0.5 becomes f32",
                 "the same seed gives the same numbers: true", "(16, 3, 8, 8) times (8, 5) is (16, 3, 8, 5)",
                 "refused: [matmul]"):
        require(line in output, f"{line!r} is missing:\n{output}")


@case("examples: 2_gradients finds the same gradients by hand, by the tape and by trying")
def gradients():
    output = succeed([programs / "2_gradients"])
    for name, slope in re.findall(r"by (hand|tape|trying):\s+d slope = (-?[0-9.]+)", output):
        require(close(float(slope), -13.5, 0.01), f"by {name}: {slope}")
    require(len(re.findall(r"d slope = ", output)) == 3, output)
    require(all(close(float(x), -6.5, 1e-4) for x in re.findall(r"d offset = (-?[0-9.]+)", output)), output)
    require("square(" in output and "mean(" in output and "saves" in output, f"no tape:\n{output}")
    require(close(number_after("update 200: loss", output), 0, 1e-6), output)
    require(re.search(r"first derivative 12, second 12\n", output), output)
    require("refused: [square]" in output, output)


@case("examples: 3_mlp reads digits it has never seen")
def mlp():
    output = succeed([programs / "3_mlp"], cwd=root)
    require(number_after("it learned from:", output) > 97, output)
    require(number_after("it has never seen:", output) > 88, output)
    require(number_after("epoch 20: loss", output) < 0.2 * number_after("epoch 1: loss", output), output)
    require("is read as a" in output, output)
    require(succeed([programs / "3_mlp"], cwd=root) == output, "another run gives other numbers")


@case("examples: 5_convolution reads digits better with fewer weights")
def convolution():
    output = succeed([programs / "5_convolution"], cwd=root)
    require(number_after("it has never seen:", output) > 94, output)
    require("3,778 parameters" in output, output)
    require(succeed([programs / "5_convolution"], cwd=root) == output, "another run gives other numbers")


@case("examples: 3_mlp tells of a missing and of a damaged file")
def mlp_bad_file():
    missing = shell([programs / "3_mlp", folder / "missing.txt"])
    require(missing.returncode == 1 and "missing.txt" in missing.stdout and missing.stdout.count("\n") == 1, missing.stdout)
    damaged = folder / "damaged.txt"
    damaged.write_text("3 " + "0" * 64 + "\n4 " + "0" * 63 + "z\n")
    result = shell([programs / "3_mlp", damaged])
    require(result.returncode == 1 and "line 2" in result.stdout, result.stdout)


@case("examples: 4_gpt learns from its own source")
def gpt():
    output = succeed([programs / "4_gpt", root / "examples" / "4_gpt.cpp", "--steps", 40], cwd=root)
    first, last = number_after("step 1: loss", output), number_after("step 40: loss", output)
    require(close(first, 5.6, 0.5), f"the first loss is {first}, that of guessing is 5.55")
    require(last < 0.6 * first, f"the loss went from {first} to {last}")
    require("\nstruct " in output and len(output.split("\nstruct ")[-1]) > 300, f"no text:\n{output}")


def write_idx(name, shape, values):
    """A packed IDX file of bytes in a folder of clothes."""
    place = folder / "clothes"
    place.mkdir(exist_ok=True)
    header = bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
    (place / name).write_bytes(gzip.compress(header + bytes(values)))


def write_clothes():
    """Images of ten classes that differ in where they are bright: 400 to learn from, 100 for the test."""
    for part, count in (("train", 400), ("t10k", 100)):
        labels = [(7 * i) % 10 for i in range(count)]
        pixels = [200 + (i % 50) if y // 3 == label else 20 for i, label in enumerate(labels) for y in range(28) for x in range(28)]
        write_idx(f"{part}-images-idx3-ubyte.gz", (count, 28, 28), pixels)
        write_idx(f"{part}-labels-idx1-ubyte.gz", (count,), labels)
    return ["--data", folder / "clothes", "--batch", 20]


@case("examples: 6_fashion_mnist learns, and goes on where it was stopped, with the same bits")
def fashion_mnist():
    program = programs / "6_fashion_mnist"
    options = write_clothes()
    whole = succeed([program, *options, "--epochs", 2, "--run-folder", folder / "clothes_whole", "--workers", 2])
    right = float(re.search(r"([0-9.]+) % of them", whole)[1])
    require(right > 60, whole)
    stopped = subprocess.Popen([str(a) for a in (program, *options, "--epochs", 2, "--log-every", 1, "--workers", 0,
                                                 "--run-folder", folder / "clothes_stopped")],
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for line in stopped.stdout:
        if line.startswith("step 10/"):
            stopped.send_signal(signal.SIGINT)
            break
    stopped.stdout.read()
    require(stopped.wait(timeout=60) == 130, "it was not stopped")
    resumed = succeed([program, *options, "--epochs", 2, "--resume", folder / "clothes_stopped"])
    require("resumed from" in resumed, resumed)
    losses = [[json.loads(line)["loss"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
              for name in ("clothes_whole", "clothes_stopped")]
    require(len(losses[0]) == 40 and losses[0] == losses[1], f"other losses:\n{losses}")


@case("examples: 6_fashion_mnist says what to install, and tells of damaged files and wrong options")
def fashion_mnist_bad_input():
    program = programs / "6_fashion_mnist"
    for arguments, words in ((["--data", folder / "nowhere"], ["nowhere", "apt-get install dataset-fashion-mnist"]),
                             (["--epochs", 0], ["--epochs"]), (["--epcohs", 3], ["--epochs"]),
                             (["--precision", "f8"], ["--precision", "bf16"]), (["--device", "tpu"], ["--device", "tpu"]),
                             (["--tune", "--resume", folder], ["--tune", "--resume"])):
        result = shell([program, *arguments])
        require(result.returncode in (1, 2) and result.stdout.count("\n") == 1, result.stdout)
        require(all(word in result.stdout for word in words), result.stdout)
    options = write_clothes()
    images = folder / "clothes" / "train-images-idx3-ubyte.gz"
    images.write_bytes(images.read_bytes()[:-100])
    result = shell([program, *options])
    require(result.returncode == 1 and "train-images-idx3-ubyte.gz" in result.stdout, result.stdout)


@case("examples: each that trains does so in half precision, and gets as far as in f32")
def half_precision():
    for program, options, text, least in (("3_mlp", [], "it has never seen:", 88),
                                          ("5_convolution", [], "it has never seen:", 94),
                                          ("6_fashion_mnist", [*write_clothes(), "--epochs", 2], None, 60)):
        for precision in ("bf16", "f16"):
            output = succeed([programs / program, *options, "--precision", precision], cwd=root)
            right = number_after(text, output) if text else float(re.search(r"([0-9.]+) % of them", output)[1])
            require(right > least, f"{program} in {precision}:\n{output}")
    losses = {}
    for precision in ("f32", "bf16", "f16"):
        output = succeed([programs / "4_gpt", "--steps", 40, "--precision", precision], cwd=root)
        losses[precision] = number_after("step 40: loss", output)
    require(losses["bf16"] != losses["f32"] != losses["f16"], f"all in f32: {losses}")
    require(all(close(loss, losses["f32"], 0.03 * losses["f32"]) for loss in losses.values()), losses)


def tuned(program, *arguments):
    """What --tune prints, and the command line that it ends with, which must run."""
    before = sorted(folder.rglob("*"))
    output = succeed([program, *arguments, "--tune", "--tune-updates", 4], cwd=folder)
    require(sorted(folder.rglob("*")) == before, "it has written something")
    table = output[output.index("\nstep "):]
    require("samples/s" in table and "kept" in table and re.search(r"^base +[0-9.]+ +[0-9.]+ MB +[0-9.]+", table, re.MULTILINE),
            output)
    require(re.search(r"^the limit is (compute|bandwidth|input) now: ", table, re.MULTILINE), output)
    command = re.search(r"^    (\S.*)$", table, re.MULTILINE)
    require(command and "--tune" not in command[1], output)
    return output, command[1]


@case("examples: --tune tries precisions and batches, and ends with a table and a command line that runs")
def tune():
    digits = root / "examples" / "data" / "digits.txt"
    for program, arguments in (("3_mlp", [digits, 1]), ("4_gpt", [root / "examples" / "4_gpt.cpp", "--steps", 4]),
                               ("5_convolution", [digits, 1]), ("6_fashion_mnist", [*write_clothes(), "--epochs", 1])):
        output, command = tuned(programs / program, *arguments)
        for row in ("precision bf16", "precision f16", "(more )?workers"):
            require(re.search(rf"^{row}.* (yes|no): ", output, re.MULTILINE), f"{program}: no row {row}:\n{output}")
        result = shell(["bash", "-c", command], cwd=folder)
        require(result.returncode == 0, f"{command}:\n{result.stdout}")


# ---- train_gpt ----

@case("train_gpt: unless a prompt is given, the text written at the end starts as the text does")
def prompt_of_the_text():
    output = trained("prompt", "--steps", 1, "--sample-tokens", 5)
    require("--- what it writes ---\nline 0: the quick brown fox" in output, output)


@case("train_gpt: a run learns, and leaves metrics, a summary and a checkpoint")
def whole_run():
    output = trained("whole", "--steps", 60, "--validate-every", 30, "--log-every", 20, "--sample-tokens", 50, "--prompt", "line ")
    lines = metrics_of("whole")
    require([line["step"] for line in lines] == list(range(1, 61)), "a line for each step")
    for key in ("step", "loss", "learning_rate", "tokens_per_second", "memory_bytes"):
        require(all(key in line for line in lines), f"{key} is missing")
    require(close(lines[0]["loss"], 5.55, 0.4), f"the first loss is {lines[0]['loss']}")
    require(lines[-1]["loss"] < 0.75 * lines[0]["loss"], f"from {lines[0]['loss']} to {lines[-1]['loss']}")
    summary = json.loads((folder / "whole" / "summary.json").read_text())
    for key in ("final_train_loss", "final_val_loss", "steps", "tokens_per_second", "mfu", "mfu_formula", "peak_memory_bytes"):
        require(summary.get(key) is not None, f"{key} is missing in {summary}")
    require(summary["steps"] == 60 and summary["final_train_loss"] == lines[-1]["loss"], summary)
    require((checkpoint_of("whole", 60) / "manifest.json").exists(), "no checkpoint")
    require(re.search(r"step 20/60  loss [0-9.]+ .*tokens/s", output), f"no plain line:\n{output}")
    require("\r" not in output, "the output is no terminal, and a line was rewritten")
    written = output.split("--- what it writes ---\n")[-1]
    require(written.startswith("line ") and len(written) > 30, f"no sample:\n{output}")
    for name in ("width", "learning-rate", "run-folder", "parameters", "training bytes"):
        require(re.search(rf"^  {name} +\S", output, re.MULTILINE), f"{name} is missing in the table:\n{output}")


@case("train_gpt: on a terminal the line is rewritten in place")
def live_line():
    command = " ".join(map(str, [train_gpt, "--text", text_file, "--run-folder", "live", *small, "--steps", 400,
                                 "--sample-tokens", 0]))
    # Bytes, because reading as text would turn every carriage return into a line end.
    result = subprocess.run(["script", "-qec", command, "/dev/null"], cwd=folder, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, timeout=120)
    output = result.stdout.decode(errors="replace")
    require(result.returncode == 0, output)
    require(len(re.findall(r"\rstep ", output)) > 1 and re.search(r"step 400/400.*tokens/s.*left", output), output)


@case("train_gpt: the same bits for one and two threads, and with and without a worker")
def same_bits():
    losses = []
    for name, options in (("bits_1", ["--threads", 1, "--workers", 0]), ("bits_2", ["--threads", 2, "--workers", 2])):
        trained(name, "--steps", 15, "--sample-tokens", 0, *options)
        losses.append([line["loss"] for line in metrics_of(name)])
    require(losses[0] == losses[1], f"{losses[0]}\n{losses[1]}")
    models = [(checkpoint_of(name, 15) / "model-0.safetensors").read_bytes() for name in ("bits_1", "bits_2")]
    require(models[0] == models[1], "the losses agree, the weights do not")


@case("train_gpt: Ctrl-C saves a checkpoint and says how to go on; going on gives the bits of a run never stopped")
def stop_and_resume():
    steps = 400
    trained("unbroken", "--steps", steps, "--sample-tokens", 0)
    process = subprocess.Popen([str(a) for a in (train_gpt, "--text", text_file, "--run-folder", "stopped", *small,
                                                 "--steps", steps, "--sample-tokens", 0, "--log-every", 1)],
                               cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output = ""
    for line in process.stdout:
        output += line
        if line.startswith("step 20/"):
            process.send_signal(signal.SIGINT)
            break
    output += process.stdout.read()
    status = process.wait(timeout=60)
    require(status == 130, f"it ended with {status}:\n{output}")
    stopped_at = len(metrics_of("stopped"))
    require(20 <= stopped_at < steps, f"it stopped at step {stopped_at}")
    require((checkpoint_of("stopped", stopped_at) / "manifest.json").exists(), f"no checkpoint:\n{output}")
    advice = re.search(r"^To go on: +(.+)$", output, re.MULTILINE)
    require(advice, f"it does not say how to go on:\n{output}")
    resumed = shell(["bash", "-c", advice[1]], cwd=folder)
    require(resumed.returncode == 0, f"{advice[1]}:\n{resumed.stdout}")
    lines = metrics_of("stopped")
    require([line["step"] for line in lines] == list(range(1, steps + 1)), "steps are missing or doubled")
    require([line["loss"] for line in lines] == [line["loss"] for line in metrics_of("unbroken")], "other losses")
    for file in ("model-0.safetensors", "optimizer-0.safetensors"):
        pair = [(checkpoint_of(name, steps) / file).read_bytes() for name in ("unbroken", "stopped")]
        require(pair[0] == pair[1], f"{file} differs")


@case("train_gpt: a run that was killed goes on from its last checkpoint")
def killed():
    process = subprocess.Popen([str(a) for a in (train_gpt, "--text", text_file, "--run-folder", "killed", *small,
                                                 "--steps", 5000, "--checkpoint-every", 10)],
                               cwd=folder, stdout=subprocess.DEVNULL)
    # An unfinished checkpoint has another name, step_00000010.partial.
    def finished_steps():
        return [int(done.parent.name[5:]) for done in (folder / "killed").glob("checkpoints/step_????????/manifest.json")]

    finished = wait_for(finished_steps, seconds=200)
    process.kill()
    process.wait()
    require(finished, "no checkpoint was written")
    newest = max(finished_steps())
    result = train("--resume", "killed", "--steps", newest + 20, "--sample-tokens", 0)
    require(result.returncode == 0 and "resumed from" in result.stdout, result.stdout)
    steps = [line["step"] for line in metrics_of("killed")]
    require(steps == list(range(1, newest + 21)), f"steps are missing or doubled: {steps}")


@case("train_gpt: --resume auto begins a run, goes on with it, and leaves one alone in which nothing sound is left")
def resume_auto():
    arguments = ["--text", text_file, "--run-folder", "auto", "--resume", "auto", *small, "--sample-tokens", 0,
                 "--checkpoint-every", 4]
    unbroken = trained("auto_unbroken", "--sample-tokens", 0, "--checkpoint-every", 4, "--steps", 12)
    require("resumed" not in unbroken, unbroken)

    def auto(steps):
        result = train(*arguments, "--steps", steps)
        require(result.returncode == 0, result.stdout)
        require([line["step"] for line in metrics_of("auto")] == list(range(1, steps + 1)), "steps are missing or doubled")
        return result.stdout

    def spoil(step):
        file = checkpoint_of("auto", step) / "model-0.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    require("resumed" not in auto(4), "there was nothing to go on from")
    require("at step 4\n" in auto(8), "it does not say from which step it goes on")
    spoil(8)
    output = auto(12)
    require("passed over" in output and "step_00000008" in output, output)
    require("at step 4, the newest checkpoint that is sound" in output, output)
    require("This run is finished" in auto(12), "nothing was left to do")
    for step in (8, 12):
        spoil(step)
    before = (folder / "auto" / "metrics.jsonl").read_text()
    refused([*arguments, "--steps", 12], "none of the checkpoints", "step_00000008", "step_00000012")
    require((folder / "auto" / "metrics.jsonl").read_text() == before, "the metrics have changed")
    # The settings of a run are those that it began with, also before its first checkpoint.
    shutil.rmtree(folder / "auto" / "checkpoints")
    refused([*arguments, "--steps", 12, "--seed", 7], "--seed", "42")
    require("a new run begins" in auto(12), "there was nothing to go on from")
    losses = [[line["loss"] for line in metrics_of(name)] for name in ("auto", "auto_unbroken")]
    require(losses[0] == losses[1], f"{losses[0]}\n{losses[1]}")
    refused(["--resume", "auto"], "--run-folder")


@case("train_gpt: a finished run can be asked to write again, or to train on")
def finished_run():
    trained("finished", "--steps", 10, "--sample-tokens", 0)
    before = (folder / "finished" / "metrics.jsonl").read_text()
    again = train("--resume", "finished", "--sample-tokens", 20, "--prompt", "the ")
    require(again.returncode == 0 and "\nthe " in again.stdout, again.stdout)
    require((folder / "finished" / "metrics.jsonl").read_text() == before, "the metrics have changed")
    require(json.loads((folder / "finished" / "summary.json").read_text())["tokens_per_second"] > 0, "the summary was lost")
    longer = train("--resume", "finished", "--steps", 15, "--sample-tokens", 0)
    require(longer.returncode == 0 and len(metrics_of("finished")) == 15, longer.stdout)


@case("train_gpt: llama learns, too")
def llama():
    trained("llama", "--model", "llama", "--steps", 40, "--sample-tokens", 5)
    lines = metrics_of("llama")
    require(lines[-1]["loss"] < 0.8 * lines[0]["loss"], f"from {lines[0]['loss']} to {lines[-1]['loss']}")


def megabytes(output, name):
    """Those of a line of the last table of memory."""
    return float(re.findall(rf"^  {name} +([\d.]+) MB", output, re.MULTILINE)[-1])


@case("train_gpt: --fit trains with the largest batch of a budget, and the peak is the predicted one")
def fits():
    sizes = ["--width", 32, "--heads", 2, "--layers", 2, "--context", 16, "--threads", 1, "--device", "cpu"]
    place = ["--text", text_file, "--run-folder", "fit", *sizes, "--steps", 5, "--sample-tokens", 0]
    output = succeed([train_gpt, *place, "--fit", "--memory-budget", 5], cwd=folder)
    predicted, measured = megabytes(output, "predicted peak"), megabytes(output, "measured peak")
    require(4.5 < predicted <= 5 and abs(measured - predicted) < 0.05 * measured, output)
    batch = json.loads((folder / "fit" / "settings.json").read_text())["batch"]
    require(f"micro-batches of {batch} items" in output, output)
    larger = ["--text", text_file, *sizes, "--batch", batch + 2, "--memory-budget", 5]
    refused(larger, "more than the budget of 5.00 MB", f"Micro-batches of {batch} fit", "Recomputation")
    output = succeed([train_gpt, *larger, "--recompute", "auto", "--run-folder", "chosen", "--steps", 2,
                      "--sample-tokens", 0], cwd=folder)
    require(megabytes(output, "measured peak") <= 5, output)
    require(json.loads((folder / "chosen" / "settings.json").read_text())["recompute"] in ("parts", "blocks"), output)
    # More MB than an i64 holds bytes are all that one could want.
    output = succeed([train_gpt, "--text", text_file, *sizes, "--memory-budget", 10**15, "--recompute", "auto",
                      "--run-folder", "plenty", "--steps", 1, "--sample-tokens", 0], cwd=folder)
    require(json.loads((folder / "plenty" / "settings.json").read_text())["recompute"] == "none", output)
    require("resumed from" in train("--resume", "fit", "--steps", 6, "--sample-tokens", 0).stdout, "not resumed")


@case("train_gpt: --tune grows micro-batches within the memory, and its command line trains")
def tune_gpt():
    sizes = ["--width", 32, "--heads", 2, "--layers", 2, "--context", 16, "--threads", 1, "--device", "cpu", "--steps", 4,
             "--sample-tokens", 0, "--warmup", 1]
    output, command = tuned(train_gpt, "--text", text_file, *sizes, "--batch", 2, "--accumulate", 4)
    require(re.search(r"^batch 4 x 2 .* (yes|no): ", output, re.MULTILINE), output)
    require("recomputation" in output, output)
    result = shell(["bash", "-c", command + " --run-folder tuned"], cwd=folder)
    require(result.returncode == 0 and len(metrics_of("tuned")) in (1, 2, 4), f"{command}:\n{result.stdout}")
    small_budget = ["--text", text_file, *sizes, "--batch", 64, "--memory-budget", 1, "--tune"]
    refused(small_budget, "MB more than the budget of 1.00 MB", "ecomputation")
    process = subprocess.Popen([str(a) for a in (train_gpt, "--text", text_file, *sizes, "--tune", "--tune-updates", 2000)],
                               cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    require(process.stdout.readline().startswith("trials of 2000 updates on "), "it does not say what it does")
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    require(process.returncode == 130 and "stopped before everything was tried" in output, output)


@case("train_gpt: without --run-folder every run gets a folder of its own")
def numbered_folders():
    place = folder / "numbered"
    place.mkdir()
    for _ in range(2):
        result = shell([train_gpt, "--text", text_file, *small, "--steps", 2, "--sample-tokens", 0], cwd=place)
        require(result.returncode == 0, result.stdout)
    require(sorted(p.name for p in (place / "runs").iterdir()) == ["gpt2-1", "gpt2-2"], "two folders")


@case("train_gpt: --help lists every option with its default")
def help_text():
    output = succeed([train_gpt, "--help"])
    for option in ("--text", "--steps", "--batch", "--context", "--layers", "--heads", "--width", "--learning-rate", "--seed",
                   "--threads", "--run-folder", "--resume", "--sample-tokens", "--prompt", "--model"):
        require(option in output, f"{option} is missing:\n{output}")


# ---- bad input ----

def refused(arguments, *words):
    """Checks for one line on standard error with all of `words`, no other effect, and a status that is not 0."""
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    result = subprocess.run([str(a) for a in (train_gpt, *arguments)], cwd=folder, text=True, capture_output=True,
                            stdin=subprocess.DEVNULL, timeout=120)
    shown = " ".join(map(str, arguments))
    require(result.returncode not in (0, -6, -11, 134, 139), f"{shown}: status {result.returncode}\n{result.stderr}")
    lines = result.stderr.splitlines()
    require(len(lines) == 1 and lines[0].startswith("error: "), f"{shown}: not one line:\n{result.stderr}")
    for word in words:
        require(word in lines[0], f"{shown}: {word!r} is missing in: {lines[0]}")
    after = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    require(before == after, f"{shown}: files have changed: {set(before.items()) ^ set(after.items())}")


@case("train_gpt: options that do not exist are refused with the nearest one that does")
def unknown_options():
    refused(["--stpes", "5"], "--stpes", "--steps")
    refused(["--learning_rate=1"], "--learning_rate", "--learning-rate")
    refused(["--txt", "a"], "--text")
    refused(["steps"], '"steps"')


@case("train_gpt: values out of range and of the wrong kind are refused")
def bad_values():
    for arguments, words in (
            (["--steps", "0"], ["--steps", "at least 1"]), (["--steps", "-5"], ["--steps", "-5"]),
            (["--steps", "abc"], ["--steps", "abc"]), (["--steps", "5.5"], ["--steps", "5.5"]),
            (["--steps", "99999999999999999999"], ["--steps"]), (["--steps"], ["--steps"]),
            (["--batch", "0"], ["--batch"]), (["--context", "0"], ["--context"]), (["--layers", "0"], ["--layers"]),
            (["--learning-rate", "0"], ["--learning-rate"]), (["--learning-rate", "nan"], ["--learning-rate"]),
            (["--dropout", "1.5"], ["--dropout"]), (["--validation-fraction", "-1"], ["--validation-fraction"]),
            (["--threads", "-1"], ["--threads"]), (["--seed", "-1"], ["--seed"]), (["--top-k", "-1"], ["--top-k"]),
            (["--temperature", "-0.1"], ["--temperature"]), (["--model", "gpt5"], ["--model", "gpt5"]),
            (["--memory-budget", "-1"], ["--memory-budget"]), (["--recompute", "block"], ["--recompute", "blocks:N"]),
            (["--precision", "f8"], ["--precision", "f8", "bf16"]), (["--tune", "--fit"], ["--tune", "--fit"]),
            (["--tune", "--recompute", "auto"], ["--tune", "auto"]), (["--tune", "--resume", "x"], ["--tune", "--resume"]),
            (["--tune-updates", "8"], ["--tune-updates", "--tune"]), (["--tune", "--tune-updates", "3"], ["at least 4"]),
            (["--fit", "--batch", "4"], ["--fit", "--batch"]), (["--fit", "--recompute", "auto"], ["--fit", "auto"]),
            (["--prompt", ""], ["--prompt"])):
        refused([*arguments, "--text", text_file], *words)
    refused(["--text", text_file, "--width", "30", "--heads", "4"], "30", "4")
    refused(["--text", text_file, "--steps", "5", "--batch", "100000"], "100000")


@case("train_gpt: text that is missing, empty, binary or too short is refused")
def bad_text():
    refused(["--text", "missing.txt"], "missing.txt", "does not exist")
    refused(["--text", ""], "empty")
    (folder / "empty.txt").write_text("")
    refused(["--text", "empty.txt"], "empty.txt", "empty")
    (folder / "binary").write_bytes(bytes(range(256)))
    refused(["--text", "binary"], "binary")
    (folder / "no_text").mkdir()
    (folder / "no_text" / "image.png").write_bytes(b"\x89PNG\0\0")
    refused(["--text", "no_text"], "no_text", "no text file")
    (folder / "short.txt").write_text("short")
    refused(["--text", "short.txt", "--context", "64"], "5 tokens", "64")


@case("train_gpt: a folder that holds something is never written to")
def used_folder():
    trained("used", "--steps", 3, "--sample-tokens", 0)
    refused(["--text", text_file, "--run-folder", "used", *small], "used", "--resume used")
    (folder / "mine").mkdir()
    (folder / "mine" / "thesis.txt").write_text("years of work")
    refused(["--text", text_file, "--run-folder", "mine", *small], "mine")
    refused(["--text", text_file, "--run-folder", "text.txt", *small], "text.txt")
    refused(["--text", text_file, "--run-folder", "text.txt/below", *small], "text.txt/below")


@case("train_gpt: a run that cannot be resumed is refused and left as it is")
def bad_resume():
    trained("base", "--steps", 6, "--checkpoint-every", 3, "--sample-tokens", 0)
    refused(["--resume", "nowhere"], "nowhere")
    refused(["--resume", "no_run_here"], "no_run_here")
    refused(["--resume", "base", "--width", "64"], "--width", "32")
    refused(["--resume", "base", "--run-folder", "other"], "--run-folder")

    def damaged(name, change):
        shutil.copytree(folder / "base", folder / name)
        change(folder / name)
        return name

    def cut(path):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    refused(["--resume", damaged("bad_settings", lambda run: cut(run / "settings.json"))], "settings.json", "damaged")
    # The newest checkpoint is truncated: the one before it is used.
    name = damaged("one_cut", lambda run: cut(run / "checkpoints" / "step_00000006" / "model-0.safetensors"))
    result = train("--resume", name, "--sample-tokens", 0)
    require(result.returncode == 0 and "at step 3" in result.stdout, result.stdout)
    require([line["step"] for line in metrics_of(name)] == list(range(1, 7)), "steps are missing or doubled")
    # Both are truncated.
    def cut_all(run):
        for model in run.glob("checkpoints/*/model-0.safetensors"):
            cut(model)
    refused(["--resume", damaged("all_cut", cut_all), "--steps", "9"], "checkpoint")
    # A text that has changed since the run began.
    other = folder / "other.txt"
    other.write_text(text_file.read_text())
    result = train("--text", other, "--run-folder", "changed", *small, "--steps", 3, "--sample-tokens", 0)
    require(result.returncode == 0, result.stdout)
    other.write_text(other.read_text().replace("fox", "cat"))
    refused(["--resume", "changed", "--steps", "9"], "text has changed")


run()
