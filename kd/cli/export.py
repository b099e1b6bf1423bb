"""`kd-export RUN [--to FOLDER]`: write the best student as a folder that timm loads and `kd-serve` serves."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kd.cli._common import guarded, parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    given = _parser().parse_intermixed_args(argv)

    def command() -> None:
        from kd.export.export import Options, export

        options = Options(
            onnx=given.onnx,
            int8=given.int8,
            openvino=given.openvino,
            pt2=given.pt2,
            calibrate=given.calibrate,
            max_drop=given.max_drop,
            tolerance=given.tolerance,
            images=given.images,
            license=given.license,
        )
        exported = export(given.run, given.to, options, given.overrides)
        print(f"wrote {exported.folder}")
        for line in exported.lines:
            print(f"  {line}")
        if given.sagemaker:
            from kd.sagemaker.archives import sagemaker_archives

            for path in sagemaker_archives(exported.folder):
                print(f"wrote {path}")
        if given.push:
            from kd.export.hub import push

            print(f"uploaded to {push(exported.folder, given.push)}")
        print(f"load it:  timm.create_model('local-dir:{exported.folder}', pretrained=True)")
        if given.onnx:
            print(f"serve it: kd-serve {exported.folder}")

    return guarded(command)


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "kd-export",
        "Write the best student of a run as one folder: for timm, for onnxruntime, for `kd-serve`. Every graph is "
        "compared with PyTorch on the run's validation images before it is kept.",
        "kd-export runs/vit_food --int8",
        with_config=False,
    )
    made.add_argument("run", metavar="RUN", type=Path, help="a run folder")
    made.add_argument("overrides", metavar="key=value", nargs="*", help="where the data lies now: data.root=FOLDER")
    made.add_argument("--to", metavar="FOLDER", type=Path, help="where to write (default: RUN/export)")
    made.add_argument(
        "--onnx", action=argparse.BooleanOptionalAction, default=True, help="write model.onnx (default: yes)"
    )
    made.add_argument("--int8", action="store_true", help="also model.int8.onnx, if it is about as accurate")
    made.add_argument("--openvino", action="store_true", help="also openvino.xml; needs kd[openvino]")
    made.add_argument("--pt2", action="store_true", help="also model.pt2 for torch.export.load")
    made.add_argument(
        "--calibrate",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="divide the logits by a temperature fitted on validation images, so that confidences are right on "
        "average; the answers stay the same (default: yes, where graphs are written)",
    )
    made.add_argument("--sagemaker", action="store_true", help="also model.tar.gz for SageMaker, in FOLDER-sagemaker")
    made.add_argument("--push", metavar="OWNER/NAME", default="", help="upload to the Hugging Face hub")
    made.add_argument("--license", metavar="ID", default="", help="licence to state in the model card, e.g. apache-2.0")
    made.add_argument("--max-drop", metavar="X", type=float, default=0.01, help="accuracy int8 may lose (default 0.01)")
    made.add_argument(
        "--tolerance", metavar="X", type=float, default=1e-3, help="logits may differ by this much (default 1e-3)"
    )
    made.add_argument(
        "--images", metavar="N", type=int, default=2000, help="images compared, evenly spaced; 0: all (default 2000)"
    )
    return made


if __name__ == "__main__":
    sys.exit(main())
