"""The tutorial's Slurm script runs, with stand-ins for srun and scontrol: two hosts on one machine, a rank each."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys

import documents

SRUN = """#!/usr/bin/env bash
# Starts the command once for each host, as srun does with one task per host.
for host in $(seq "$SLURM_NNODES"); do "$@" & tasks+=($!); done
for task in "${tasks[@]}"; do wait "$task" || exit 1; done
"""
SCONTROL = "#!/usr/bin/env bash\necho 127.0.0.1\necho other-host\n"


def free_job():
    """A job number whose port (20000 + number % 20000) is free, and none that outgoing connections are given."""
    for number in random.SystemRandom().sample(range(12_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", 20_000 + number))
            return number
    raise AssertionError("no free port")


def launch(folder, job, hosts, arguments):
    path = os.pathsep.join([str(folder), os.path.dirname(sys.executable), os.environ["PATH"]])
    environment = {
        "PATH": path,
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NODELIST": "host[1-2]",
        "SLURM_NNODES": str(hosts),
        "SLURM_GPUS_ON_NODE": "1",
        "RECIPE": "synthetic",
        "ARGUMENTS": arguments,
    }
    script = ["bash", "train.sbatch"]
    return subprocess.run(script, cwd=folder, env=os.environ | environment, timeout=240, capture_output=True, text=True)


def test_the_script_trains_on_two_hosts_and_resumes(tmp_path):
    page = documents.ROOT / "docs" / "tutorials" / "more-gpus.md"
    (block,) = [block for block in documents.blocks(page) if block.title == "train.sbatch"]
    assert block.text.startswith("#!/usr/bin/env bash\n#SBATCH")
    (tmp_path / "train.sbatch").write_text(block.text)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = free_job()
    small = "--set data.synthetic.events=2000 --set data.batch_size=64 --set train.max_steps=4"
    first = launch(tmp_path, job, 2, small)
    assert first.returncode == 0, first.stderr[-3000:]
    run = tmp_path / "runs" / f"job-{job}"
    assert json.loads((run / "model.json").read_text())["world"] == 2
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(record["step"] for record in steps if record["kind"] == "step") == 4
    again = launch(tmp_path, job, 1, small)  # requeued, with one host: the folder is there, so it resumes
    assert again.returncode == 0, again.stderr[-3000:]
    assert "resumed at step 4 of 4" in again.stdout + again.stderr
