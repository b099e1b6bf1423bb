"""SageMaker's profiler in a training job: system metrics, and the rules that judge them
when the job ends.

From the pages "Configure Debugger using the SageMaker API" and "Debugger registry URLs
for built-in rule evaluators" of the SageMaker developer guide. Metrics of the framework
are left out: Debugger has none for PyTorch 2. `kd` records its own (`timeline_0.jsonl`,
`findings.json`, `profile.steps`).
"""

import re
from typing import Any

from kd.core.errors import ConfigError

INTERVALS_MS = (100, 200, 500, 1000, 5000, 60000)  # that API_ProfilerConfig allows
INTERVAL_MS = 1000  # as often as kd samples the machine
_ACCOUNTS = """
    ap-east-1 199566480951 ap-northeast-1 430734990657 ap-northeast-2 578805364391 ap-south-1 904829902805
    ap-southeast-1 972752614525 ap-southeast-2 184798709955 ca-central-1 519511493484 cn-north-1 618459771430
    cn-northwest-1 658757709296 eu-central-1 482524230118 eu-north-1 314864569078 eu-west-1 929884845733
    eu-west-2 250201462417 eu-west-3 447278800020 me-south-1 986000313247 sa-east-1 818342061345
    us-east-1 503895931360 us-east-2 915447279597 us-west-1 685455198987 us-west-2 895741380848
"""
RULES = dict(re.findall(r"(\S+) ([0-9]+)", _ACCOUNTS))
"""AWS accounts that hold the image of the built-in rules, by region."""


def sections(image: str, output: str) -> dict[str, Any]:
    """Return the sections of CreateTrainingJob for a job with the training image
    `image`, in whose region it runs.

    ProfilerReport applies every built-in rule of the profiler and writes one report to
    S3.
    """
    found = re.match(
        r"[0-9]+\.dkr\.ecr\.([a-z0-9-]+)\.(amazonaws\.com(?:\.cn)?)/", image
    )
    region = found[1] if found else ""
    if not found or region not in RULES:
        wrong = (
            f"has no image of the rules in '{region}'"
            if found
            else f"cannot read a region from --image '{image}'"
        )
        remedy = (
            "Drop it, or write ProfilerConfig and ProfilerRuleConfigurations into"
            " --extra"
        )
        raise ConfigError(
            "--profiler", wrong, f"An image in ECR in one of {', '.join(RULES)}", remedy
        )
    rules = (
        f"{RULES[region]}.dkr.ecr.{region}.{found[2]}/sagemaker-debugger-rules:latest"
    )
    name = "ProfilerReport"
    rule = {
        "RuleConfigurationName": name,
        "RuleEvaluatorImage": rules,
        "RuleParameters": {"rule_to_invoke": name},
    }
    metrics = {
        "S3OutputPath": f"{output}/profiler",
        "ProfilingIntervalInMilliseconds": INTERVAL_MS,
    }
    return {
        "ProfilerConfig": metrics,
        "ProfilerRuleConfigurations": [rule | {"S3OutputPath": f"{output}/profiler"}],
    }
