"""The version, in the one place that packaging, files and users read."""

VERSION = "0.1.0"
