FACTORS = {"m": 1.0}


def convert(number, unit, to):
    if unit != "m" or to != "m":
        raise NotImplementedError
    return number
