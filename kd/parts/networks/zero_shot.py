"""Zero-shot classification by name: the image tower of CLIP or SigLIP, and one vector
per class.

Radford et al. 2021 (arXiv:2103.00020), section 3.1.4: a class vector is the normalized
mean of its texts' unit vectors. The logits are the cosine of image and class times the
model's learned scale. SigLIP's bias (arXiv:2303.15343) is left out: it is equal for all
classes and does not change a softmax.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from pydantic import NonNegativeFloat
from torch import Tensor, nn
from torch.nn import functional as F

from kd.core.errors import ModelError, first_sentence
from kd.core.keys import Keys, file_key, keys
from kd.models.answer_table import read_vectors
from kd.models.classifier import Classifier
from kd.models.spec import Spec
from kd.parts.networks._shared import columns, named, read_names
from kd.parts.networks._towers import (
    Tower,
    library,
    loaded,
    preprocessing,
    quiet,
    read_config,
    vision_config,
)

TOWERS = {
    "clip": ("CLIPModel", "CLIPVisionModelWithProjection"),
    "siglip": ("SiglipModel", "SiglipVisionModel"),
    "clip_vision_model": ("", "CLIPVisionModelWithProjection"),
    "siglip_vision_model": ("", "SiglipVisionModel"),
}  # by model type: the class with both towers, and the class with only the image tower


@keys
class Options(Keys):
    """The classes as texts or as vectors."""

    classes: str = file_key("")
    """Text file of the class names, one per line. Empty: the data's names, or those of
    `vectors`.
    """
    prompts: tuple[str, ...] = ("a photo of a {}.",)
    """Texts about a class, with `{}` for its name; their vectors are averaged."""
    vectors: str = file_key("")
    """A .safetensors or .npz file with `vectors` [classes, D] and the class names,
    instead of a text tower.
    """
    scale: NonNegativeFloat = 0.0
    """Factor of the cosine. 0: the learned scale. Required with `vectors` if the folder
    has only one tower.
    """

    def __post_init__(self) -> None:
        if not self.prompts or not all(
            prompt.count("{}") == 1 for prompt in self.prompts
        ):
            raise ValueError(
                f"prompts are {list(self.prompts)}; each has one {{}} for the name of"
                " the class"
            )


class Nearest(nn.Module):
    """The scaled cosine between an image and each class."""

    def __init__(self, tower: Tower, vectors_CD: Tensor, scale: float) -> None:
        super().__init__()
        self.tower, self.scale = tower, scale
        self.register_buffer("vectors", vectors_CD.float())

    def forward(self, pixels: Tensor) -> Tensor:
        image_BD = F.normalize(self.tower(pixels), dim=1)
        return self.scale * image_BD @ self.vectors.T.to(image_BD.dtype)  # type: ignore[operator]


def build(
    options: Options, spec: Spec, image_size: int, features: Collection[str]
) -> Classifier:
    """Load the image tower, and compute or read the class vectors."""
    hub = library(spec.config_path)
    config = read_config(spec, hub)
    if config.model_type not in TOWERS:
        wrong = f"'{spec.model}' is a {config.model_type}"
        raise ModelError(
            f"{spec.config_path}.model",
            wrong,
            f"One of: {', '.join(TOWERS)}",
            "Choose a model with texts",
        )
    if features or not spec.logits:
        remedy = "Set teacher.kind=transformers for its features"
        raise ModelError(
            f"{spec.config_path}.kind",
            "is zero_shot, which returns logits",
            "Losses on logits",
            remedy,
        )
    spec.require_meaning(
        "single_label_classification"
    )  # a class's score is meaningful only relative to the others
    shown, own = preprocessing(spec, hub, config, image_size)
    both, alone = TOWERS[config.model_type]
    file = (
        read_names(options.classes, f"{spec.config_path}.classes")
        if options.classes
        else None
    )
    if options.vectors:
        names, vectors_CD = chosen_vectors(
            spec, options.vectors, file or list(spec.classes or [])
        )
        whole = (
            bool(both) and not options.scale
        )  # the learned scale is stored beside the towers
        part = (both, config) if whole else (alone, vision_config(config))
        model = loaded(spec, hub, *part)
    else:
        if not both:
            wrong = f"'{spec.model}' has no text tower"
            raise ModelError(
                f"{spec.config_path}.model",
                wrong,
                "A model with both towers, or vectors",
                "Set vectors",
            )
        names = file or list(spec.classes or [])
        if not names:
            wrong = "is missing: neither the data nor the model names classes"
            raise ModelError(
                f"{spec.config_path}.classes",
                wrong,
                "A text file, one class a line",
                "Add it",
            )
        model = loaded(spec, hub, both, config)
        vectors_CD = text_vectors(spec, hub, model, names, options.prompts)
    scale = options.scale or _learned(spec, model)
    if hasattr(model, "text_model"):
        model.text_model = None  # type: ignore[assignment]  # it is not needed after the class vectors are computed
    with torch.no_grad():
        width = Tower(model)(
            torch.zeros(1, 3, shown["input_size"], shown["input_size"])
        ).shape[1]
    if vectors_CD.shape[1] != width:
        wrong = (
            f"holds vectors of {vectors_CD.shape[1]} numbers, but the image tower's"
            f" have {width}"
        )
        raise ModelError(
            f"{spec.config_path}.vectors",
            wrong,
            "Vectors from the text tower of the same model",
            "",
        )
    classes, pick = named(spec, len(vectors_CD), names, "")
    for rows in columns(pick).values():
        vectors_CD = vectors_CD[rows]
    architecture = {"zero_shot": type(config).__name__, "scale": scale}
    network = Nearest(
        Tower(model, own.order), F.normalize(vectors_CD.float(), dim=1), scale
    )
    teacher = Classifier(
        network,
        num_classes=len(classes),
        classes=classes,
        architecture=architecture,
        **shown,
    )
    teacher.preprocessing = own.preprocessing
    return teacher


def chosen_vectors(
    spec: Spec, path: str, wanted: list[str]
) -> tuple[list[str], Tensor]:
    """Return class names and their vectors [C, D], matched by name if the file has
    names.
    """
    config_path = f"{spec.config_path}.vectors"
    names, vectors_CD = read_vectors(path, config_path)
    position = {name: i for i, name in enumerate(names)}
    missing = [name for name in wanted if name not in position] if names else []
    twice = [name for name, count in Counter(names).items() if count > 1]
    if missing or twice:
        wrong = (
            f"'{path}' has {'no vector' if missing else 'two vectors'} of the class"
            f" '{[*missing, *twice][0]}'"
        )
        raise ModelError(
            config_path,
            wrong,
            f"It names {', '.join(names[:5])}",
            "One vector for each class",
        )
    if names and wanted:
        names, vectors_CD = wanted, vectors_CD[[position[name] for name in wanted]]
    if zeros := (vectors_CD == 0).all(1).nonzero()[:, 0].tolist():
        wrong = f"'{path}' has zeros as the vector of class {zeros[0]}"
        raise ModelError(
            config_path, wrong, "A direction for each class", "Write it anew"
        )
    return names or wanted, vectors_CD


@torch.no_grad()
def text_vectors(
    spec: Spec, hub: Any, model: Any, names: Sequence[str], prompts: Sequence[str]
) -> Tensor:
    """Return one unit vector per class [C, D]: the normalized mean over the prompts."""
    try:
        with quiet(hub):
            tokenizer = hub.AutoTokenizer.from_pretrained(spec.model)
    except (
        Exception
    ) as error:  # transformers raises many types, all caused by the folder
        wrong = (
            f"'{spec.model}' has no tokenizer that can be loaded"
            f" ({first_sentence(error, 150)})"
        )
        allowed = "Its tokenizer beside the model, or a file of vectors"
        remedy = f"Add it to the folder, or set {spec.config_path}.vectors"
        raise ModelError(f"{spec.config_path}.model", wrong, allowed, remedy) from error
    _require_words(spec, tokenizer, names, model.config.text_config.vocab_size)
    siglip = "siglip" in model.config.model_type  # trained on padded texts
    most = model.config.text_config.max_position_embeddings
    found, wanted = [], ["input_ids"] if siglip else ["input_ids", "attention_mask"]
    for name in names:
        texts = [prompt.replace("{}", name) for prompt in prompts]
        padding = {"padding": "max_length" if siglip else True, "max_length": most}
        tokens = tokenizer(texts, return_tensors="pt", truncation=True, **padding)
        vectors = model.get_text_features(
            **{key: tokens[key] for key in wanted if key in tokens}
        )
        vectors_PD = vectors if isinstance(vectors, Tensor) else vectors.pooler_output
        found.append(F.normalize(F.normalize(vectors_PD, dim=1).mean(0), dim=0))
    return torch.stack(found)


def _require_words(spec: Spec, tokenizer: Any, names: Sequence[str], size: int) -> None:
    """Require that the tokenizer distinguishes the classes: without its files
    transformers may create an empty one.
    """
    seen: dict[tuple[int, ...], str] = {}
    for name in names:
        ids = tuple(tokenizer(name, add_special_tokens=False)["input_ids"])
        known = [id for id in ids if id != tokenizer.unk_token_id]
        other = seen.setdefault(ids, name)
        if not known or max(ids) >= size or other != name:
            wrong = f"the tokenizer of '{spec.model}' does not know the class '{name}'"
            wrong += f" from '{other}'" if other != name else ""
            remedy = (
                f"Add its tokenizer to the folder, or set {spec.config_path}.vectors"
            )
            raise ModelError(
                f"{spec.config_path}.model",
                wrong,
                "The tokenizer that the model was trained with",
                remedy,
            )


def _learned(spec: Spec, model: Any) -> float:
    if not hasattr(model, "logit_scale"):
        wrong = (
            f"is missing: '{spec.model}' has an image tower alone, which has learned"
            " none"
        )
        raise ModelError(
            f"{spec.config_path}.scale",
            wrong,
            "A number above 0; CLIP's is 100",
            "Set it",
        )
    return float(model.logit_scale.detach().exp())
