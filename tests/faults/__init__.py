"""Faults that other routers have had, FastDeploy's first of all: a test for each, named after it."""
