"""Request SageMaker's profiler: system metrics, and rules that judge them at the end.

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
    ap-east-1 199566480951 ap-northeast-1 430734990657 ap-northeast-2 578805364391
    ap-south-1 904829902805 ap-southeast-1 972752614525 ap-southeast-2 184798709955
    ca-central-1 519511493484 cn-north-1 618459771430 cn-northwest-1 658757709296
    eu-central-1 482524230118 eu-north-1 314864569078 eu-west-1 929884845733
    eu-west-2 250201462417 eu-west-3 447278800020 me-south-1 986000313247
    sa-east-1 818342061345 us-east-1 503895931360 us-east-2 915447279597
    us-west-1 685455198987 us-west-2 895741380848
"""
RULES = dict(re.findall(r"(\S+) ([0-9]+)", _ACCOUNTS))
"""AWS accounts that hold the image of the built-in rules, by region."""


def profiler_sections(image: str, output: str) -> dict[str, Any]:
    """Return sections of CreateTrainingJob for a job in its training image's region.

    ProfilerReport applies every built-in rule of the profiler and writes one report to
    S3.
    """
    registry = re.match(
        r"[0-9]+\.dkr\.ecr\.([a-z0-9-]+)\.(amazonaws\.com(?:\.cn)?)/", image
    )
    if registry is None or registry[1] not in RULES:
        wrong = f"cannot read a region from --image '{image}'"
        if registry:
            wrong = f"has no image of the rules in '{registry[1]}'"
        remedy = (
            "Drop it, or write ProfilerConfig and ProfilerRuleConfigurations into"
            " --extra"
        )
        raise ConfigError(
            "--profiler", wrong, f"An image in ECR in one of {', '.join(RULES)}", remedy
        )
    region, domain = registry.groups()
    host = f"{RULES[region]}.dkr.ecr.{region}.{domain}"
    target = f"{output}/profiler"
    rule = {
        "RuleConfigurationName": "ProfilerReport",
        "RuleEvaluatorImage": f"{host}/sagemaker-debugger-rules:latest",
        "RuleParameters": {"rule_to_invoke": "ProfilerReport"},
        "S3OutputPath": target,
    }
    metrics = {
        "S3OutputPath": target,
        "ProfilingIntervalInMilliseconds": INTERVAL_MS,
    }
    return {"ProfilerConfig": metrics, "ProfilerRuleConfigurations": [rule]}
