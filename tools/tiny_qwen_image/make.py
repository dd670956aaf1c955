"""Makes the tiny Qwen-Image from nothing: renders shapes, trains a VAE, then a transformer, writes a diffusers folder.

    python make.py OUT_FOLDER [--device cuda] [--seed 0] [--smoke]

The folder's path must contain `qwen-image`, by which SGLang knows the family. Beside the folder's own parts this
writes to `--log-dir` the curves (vae_curve and loss_curve, CSV and PNG), samples.png and summary.json.
"""

import argparse
import csv
import json
import time
from pathlib import Path

import numpy as np
import torch
from captions import caption_odds
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
from flowgrpo_rewards.shapes import all_specs, render, score_pixels
from PIL import Image
from plot import plot
from text import make_text_encoder, make_tokenizer
from torch import Tensor
from transformer import new_scheduler, new_transformer, pack, sample, train_transformer, unpack
from vae import LATENT_CHANNELS, decode, encode, measure_latents, new_vae, psnr, train_vae, use_one_frame

SIZE = 32
TOKENS = (SIZE // 8) ** 2
SAMPLING_STEPS = 10


def main() -> None:
    args = _arguments()
    if "qwen-image" not in str(args.out):
        raise SystemExit(f"{args.out}: the path must contain 'qwen-image', or SGLang will not know the model")
    started = time.time()
    torch.manual_seed(args.seed)
    args.log_dir.mkdir(parents=True, exist_ok=True)
    if torch.device(args.device).type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    specs = [*all_specs()] * (args.pictures // len(all_specs()))
    picture_BCHW = _as_tensor(render(specs, size=SIZE, seed=args.seed)).to(args.device)
    vae, vae_curve = _vae(args, picture_BCHW)
    latent_NPC = torch.cat([pack(encode(vae, x)) for x in picture_BCHW.split(512)])

    captions = [spec.caption for spec in all_specs()]
    tokenizer = make_tokenizer(captions, args.out / "tokenizer")
    text_encoder = make_text_encoder(tokenizer, seed=args.seed)
    text = embed(tokenizer, text_encoder, [*captions, ""], args.device)

    torch.manual_seed(args.seed)
    transformer, curve = train_transformer(
        new_transformer().to(args.device),
        latent_NPC,
        drawn_captions(text, caption_odds(wrong=args.wrong, empty=args.empty).to(args.device)),
        steps=args.steps,
        batch=args.batch,
        evaluate=lambda model: evaluate(model, vae, text),
    )
    pipeline = QwenImagePipeline(
        scheduler=new_scheduler(), vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, transformer=transformer
    )
    pipeline.save_pretrained(args.out)
    _forget_this_machine(args.out)

    result = evaluate(transformer, vae, text, pictures_file=args.log_dir / "samples.png")
    for name, rows, column in (("vae_curve", vae_curve, "psnr_db"), ("loss_curve", curve, "loss")):
        if rows:
            _write_csv(args.log_dir / f"{name}.csv", rows)
            plot(args.log_dir / f"{name}.csv", column, args.log_dir / f"{name}.png")
    summary = {"seed": args.seed, "device": _device_name(args.device), "seconds": round(time.time() - started, 1)}
    summary |= {name: getattr(args, name) for name in ("pictures", "steps", "batch", "wrong", "empty")}
    if vae_curve:
        summary["vae_steps"] = args.vae_steps
    summary |= {"vae_psnr_db": round(psnr(vae, picture_BCHW[:1024]), 2), "loss": curve[-1]["loss"], **result}
    (args.log_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary), flush=True)


def _vae(args: argparse.Namespace, picture_BCHW: Tensor) -> tuple[AutoencoderKLQwenImage, list[dict[str, float]]]:
    """A trained VAE and its curve: loaded from `--vae`, or trained here."""
    if args.vae is not None:
        vae = AutoencoderKLQwenImage.from_pretrained(args.vae).to(args.device).eval().requires_grad_(False)
        use_one_frame(vae)
        return vae, []
    vae = new_vae().to(args.device)
    use_one_frame(vae)
    curve = train_vae(vae, picture_BCHW, steps=args.vae_steps, batch=args.vae_batch)
    vae.eval().requires_grad_(False)
    measure_latents(vae, picture_BCHW[:4096])
    vae.save_pretrained(args.out / "vae")
    return vae, curve


def embed(tokenizer, text_encoder, prompts: list[str], device: str) -> tuple[Tensor, Tensor]:
    """(embeddings, mask) of `prompts` as QwenImagePipeline makes them, template and cut included."""
    pipeline = QwenImagePipeline(
        scheduler=None, vae=None, text_encoder=text_encoder, tokenizer=tokenizer, transformer=None
    )
    with torch.no_grad():
        embeddings, mask = pipeline._get_qwen_prompt_embeds(prompts, device=torch.device("cpu"))
    return embeddings.to(device), mask.to(device)


def drawn_captions(text: tuple[Tensor, Tensor], odds: Tensor):
    """For rows of the pictures, which repeat the world's order, the text of captions drawn by `odds`."""

    def text_of_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
        drawn = torch.multinomial(odds[rows % len(odds)], 1)[:, 0]
        return text[0][drawn], text[1][drawn]

    return text_of_rows


def evaluate(
    transformer, vae, text: tuple[Tensor, Tensor], *, per_caption: int = 4, pictures_file: Path | None = None
) -> dict[str, float]:
    """Mean scores of fresh pictures of every caption, always from the same noise."""
    specs = [*all_specs()] * per_caption
    embeddings, mask = (part[: len(all_specs())].repeat(per_caption, *[1] * (part.ndim - 1)) for part in text)
    noise = torch.randn(len(specs), TOKENS, 4 * LATENT_CHANNELS, generator=torch.Generator().manual_seed(7))
    latent_BPC = sample(transformer, noise.to(embeddings), embeddings, mask, steps=SAMPLING_STEPS)
    picture_BHWC = to_pixels(decode(vae, unpack(latent_BPC)))
    if pictures_file is not None:
        _write_grid(picture_BHWC[:120], pictures_file)
    return {name: float(value_B.mean()) for name, value_B in score_pixels(picture_BHWC, specs).items()}


def _forget_this_machine(folder: Path) -> None:
    """Drops where the parts were loaded from, which says nothing about the model."""
    for path in folder.rglob("*.json"):
        config = json.loads(path.read_text())
        if private := config.keys() & {"_name_or_path", "is_local", "local_files_only"}:
            kept = {key: value for key, value in config.items() if key not in private}
            path.write_text(json.dumps(kept, indent=2) + "\n")


def to_pixels(picture_BCHW: Tensor) -> np.ndarray:
    """uint8 [B, H, W, 3] of pictures in [-1, 1], rounded as the pipeline does."""
    return ((picture_BCHW * 0.5 + 0.5).permute(0, 2, 3, 1) * 255).round().to(torch.uint8).cpu().numpy()


def _as_tensor(picture_BHWC: np.ndarray) -> Tensor:
    return torch.from_numpy(picture_BHWC).permute(0, 3, 1, 2).float() / 127.5 - 1.0


def _write_grid(picture_BHWC: np.ndarray, path: Path, *, columns: int = 20, scale: int = 2) -> None:
    B, H, W, _ = picture_BHWC.shape
    sheet = Image.new("RGB", (columns * (W + 2), -(-B // columns) * (H + 2)), "white")
    for i, picture in enumerate(picture_BHWC):
        sheet.paste(Image.fromarray(picture), (i % columns * (W + 2), i // columns * (H + 2)))
    sheet.resize((sheet.width * scale, sheet.height * scale), Image.Resampling.NEAREST).save(path)


def _write_csv(path: Path, rows: list[dict[str, float]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows({key: round(value, 5) for key, value in row.items()} for row in rows)


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if torch.device(device).type == "cuda" else "cpu"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write; its path must contain qwen-image")
    parser.add_argument("--log-dir", type=Path, default=Path("log"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pictures", type=int, default=36_000, help="rendered once, a multiple of 120")
    parser.add_argument("--vae-steps", type=int, default=2500)
    parser.add_argument("--vae-batch", type=int, default=128)
    parser.add_argument("--vae", type=Path, help="folder of a VAE made before, to skip its training")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--wrong", type=float, default=0.65, help="share of captions with one wrong attribute")
    parser.add_argument("--empty", type=float, default=0.05, help="share of pictures without a caption")
    parser.add_argument("--smoke", action="store_true", help="seconds instead of minutes, for a dry run")
    args = parser.parse_args()
    if args.smoke:
        args.pictures, args.vae_steps, args.vae_batch, args.steps, args.batch = 120, 2, 8, 1, 8
    return args


if __name__ == "__main__":
    main()
