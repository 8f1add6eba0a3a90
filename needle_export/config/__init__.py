"""What a build is asked to do and how it tells its progress: frozen values, no behaviour of stages."""
