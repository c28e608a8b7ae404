"""The version of sbp."""

VERSION = "0.1.0"
