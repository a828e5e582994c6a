#!/usr/bin/env python3
"""Makes all files of models/ from scratch: text, tokenized rows, two models, two draft models, an image tower.
One GPU, PyTorch 2. models/README.md says how long each stage took; the image tower is trained for --seconds.

  python3 tools/make_models.py --work DIR              every stage whose files do not exist yet; can be stopped and restarted
  python3 tools/make_models.py --work DIR --only mini  one stage, in this process
  python3 tools/make_models.py --work DIR --smoke      every stage with a few steps, to check that all run
  python3 tools/make_models.py --work DIR --only mmproj --seconds 450 --from FILE    the image tower, trained on from a file
  python3 tools/make_models.py --measure models        acceptance of the draft models in a folder (a minute)

Stages run in parallel where possible: text | mini, mini-e (as the text comes) | rows, mmproj (need mini) | mtp, dflash |
acceptance. Each writes DIR/STAGE.log. Training resumes from a state that is saved every 1000 steps.
"""
import argparse
import os
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
STEPS, SMOKE_STEPS = {"mini": 5200, "mini-e": 8000}, 16   # of 65,536 ids
SECONDS = 900                                  # of the image tower
STAGES = {                                     # stage: (stages it needs, the file that it writes last)
    "text": ((), "text.done"),
    "mini": ((), "gemma4-mini-q8_0.gguf"),
    "mini-e": ((), "gemma4-mini-e-q8_0.gguf"),
    "rows": (("mini",), "rows.npz"),
    "mtp": (("rows",), "gemma4-mini-mtp-q8_0.gguf"),
    "dflash": (("rows",), "gemma4-mini-dflash-q8_0.gguf"),
    "mmproj": (("mini",), "gemma4-mini-mmproj-f16.gguf"),
    "acceptance": (("mtp", "dflash"), "acceptance.md")}


def measured(folder, device, **sizes):
    """-> acceptance of both draft models in the folder, as Markdown tables"""
    import drafters
    return drafters.measure_files(*(os.path.join(folder, "gemma4-mini%s-q8_0.gguf" % part) for part in ("", "-mtp", "-dflash")),
                                  device, **sizes)


def run_stage(stage, work, smoke, device, seconds=SECONDS, old=None):
    def file(name):
        return os.path.join(work, name)

    start = time.time()

    def log(line):
        print("%6.0f s  %s" % (time.time() - start, line), flush=True)

    n_steps = {model: SMOKE_STEPS if smoke else n for model, n in STEPS.items()}
    log("start")
    if stage == "text":
        import train
        for n in sorted(set(n_steps.values())):
            train.make_text(file("text"), n, max(2, (os.cpu_count() or 4) - 4))
        open(file("text.done"), "w").close()
    elif stage in ("mini", "mini-e"):
        import gemma4
        import gguf
        import train
        form = gemma4.MINI if stage == "mini" else gemma4.MINI_E
        weights = train.train(form, work, n_steps[stage], device, log)
        for kind, name in ((gguf.F16, "f16"), (gguf.Q8_0, "q8_0")):
            size = gemma4.write_model(file("%s-%s.gguf" % (form.file, name)), form, weights, kind)
            log("%s %s: %d bytes" % (form.file, name, size))
    elif stage == "mmproj":
        import see
        see.TARGET = file("gemma4-mini-q8_0.gguf")
        see.make(file(STAGES[stage][1]), device, log, 20 if smoke else seconds, old)
    elif stage == "acceptance":
        tables = measured(work, device, **(dict(n=8) if smoke else {}))
        with open(file("acceptance.md"), "w") as f:
            f.write(tables)
    else:
        import drafters
        target, rows = file("gemma4-mini-f16.gguf"), file("rows.npz")
        if stage == "rows":
            drafters.make_rows(rows, target, device, log, **(dict(n_train=480, n_text=256) if smoke else {}))
        else:
            make = drafters.train_mtp if stage == "mtp" else drafters.train_dflash
            make(file("gemma4-mini-%s-q8_0.gguf" % stage), rows, target, device, log,
                 **(dict(n_steps=SMOKE_STEPS) if smoke else {}))
    log("done")


def run_all(work, smoke, device):
    running, failed = {}, []

    def is_done(stage):
        return stage not in running and os.path.exists(os.path.join(work, STAGES[stage][1]))

    while not failed and (running or not all(map(is_done, STAGES))):
        for stage, (needs, _) in STAGES.items():
            if stage not in running and not is_done(stage) and all(map(is_done, needs)):
                command = [sys.executable, os.path.join(HERE, "make_models.py"), "--work", work, "--only", stage,
                           "--device", device] + ["--smoke"] * smoke
                with open(os.path.join(work, stage + ".log"), "a") as log:
                    running[stage] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
                print("%s: started" % stage, flush=True)
        time.sleep(0.5)
        for stage, process in list(running.items()):
            if process.poll() is not None:
                del running[stage]
                print("%s: %s" % (stage, "done" if process.returncode == 0 else "FAILED, see %s.log" % stage), flush=True)
                if process.returncode:
                    failed.append(stage)
    for process in running.values():
        process.terminate()
    return 1 if failed else 0


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    what = ap.add_mutually_exclusive_group(required=True)
    what.add_argument("--work")
    what.add_argument("--measure")
    ap.add_argument("--only", choices=STAGES)
    ap.add_argument("--smoke", action="store_true")
    ap.add_argument("--device", default="cuda")
    ap.add_argument("--seconds", type=float, default=SECONDS, help="time to train the image tower")
    ap.add_argument("--from", dest="old", help="image tower to train on from")
    a = ap.parse_args()
    if a.measure:
        print(measured(a.measure, a.device))
        sys.exit()
    os.makedirs(a.work, exist_ok=True)
    if a.only:
        run_stage(a.only, a.work, a.smoke, a.device, a.seconds, a.old)
    else:
        sys.exit(run_all(a.work, a.smoke, a.device))
