"""The mmengine protocol; with mmengine installed, as subclasses of its classes."""
