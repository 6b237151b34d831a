raise ImportError('a bare name was imported from the working directory')
