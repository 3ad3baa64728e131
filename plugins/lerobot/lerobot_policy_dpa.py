"""Runs LeRobot's diffusion policies accelerated in LeRobot's own commands.

LeRobot imports every installed distribution of such a name as its commands start. The environment
switches and configures, as :func:`dpa.acceleration.construction.options_from` explains.
"""

import logging

from dpa.acceleration.construction import accelerate_new_by_environment

try:
    accelerate_new_by_environment(logging.info)
except ValueError as error:  # LeRobot's own log would name the plugin, and not the reason
    logging.error("dpa: %s; LeRobot runs as it is", error)
