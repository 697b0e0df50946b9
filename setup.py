"Packaging. Everything that can vary is read from settings.ini; nbdev's docs find the library by the entry point."
from configparser import ConfigParser
from pathlib import Path
from setuptools import setup, find_packages

config = ConfigParser(delimiters=["="])
config.read("settings.ini", encoding="utf-8")
cfg = config["DEFAULT"]
extras = {name: cfg[f"{name}_requirements"].split() for name in ("workflow", "dev", "bench")}
extras["dev"] = extras["workflow"] + extras["dev"]

setup(
    name=cfg["lib_name"], version=cfg["version"], description=cfg["description"], keywords=cfg["keywords"],
    author=cfg["author"], author_email=cfg["author_email"], url=cfg["git_url"],
    license="Apache-2.0", license_files=["LICENSE"],
    long_description=Path("README.md").read_text(encoding="utf-8"), long_description_content_type="text/markdown",
    classifiers=["Development Status :: 3 - Alpha", "Intended Audience :: Science/Research", "Programming Language :: Python :: 3"],
    packages=find_packages(include=["tiny_rlvr", "tiny_rlvr.*"]), include_package_data=True,
    python_requires=f">={cfg['min_python']}", install_requires=cfg["requirements"].split(), extras_require=extras,
    entry_points={"nbdev": [f"{cfg['lib_path']}={cfg['lib_path']}._modidx:d"]},
    zip_safe=False,
)
